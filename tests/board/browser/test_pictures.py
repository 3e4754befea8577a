"""Pictures of the pages in light and dark, as docs/board.md shows them.

With TOKENYARD_TEST_PICTURES=docs/board they are written there; else only made.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.board.browser.conftest import NewWindow
from tests.board.browser.stage import Stage
from tests.board.browser.window import Window
from tests.support.processes import ROOT

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

MOST_BYTES = 150_000
WIDTH, HEIGHT, MOST_HEIGHT = 1280, 800, 1500


def _request(stage: Stage) -> str:
    return f"/request?client=web&id={stage.spoken}"


def _letter(stage: Stage) -> str:
    letters = stage.plant.connection.xrevrange(stage.plant.keys.dead, count=1)
    return f"/dead/{letters[0][0].decode()}"


@pytest.fixture(scope="module")
def flowing(speaking: Stage) -> Stage:
    """The yard while much is going on."""
    speaking.flow()
    return speaking


#: By name: the page, which may depend on what is on the yard.
PICTURES: dict[str, str | Callable[[Stage], str]] = {
    "yard": "/",
    "devices": "/devices",
    "models": "/models",
    "requests": "/requests",
    "request": _request,
    "dead": "/dead",
    "letter": _letter,
    "tenants": "/tenants",
    "keys": "/keys",
    "batches": "/batches",
    "signals": "/signals",
    "audit": "/audit",
}


def taken(window: Window) -> bytes:
    """The page as PNG with a palette."""
    height = window.page.evaluate("document.documentElement.scrollHeight")
    window.page.set_viewport_size({"width": WIDTH, "height": min(max(height, HEIGHT), MOST_HEIGHT)})
    window.page.evaluate("document.fonts.ready")
    picture = Image.open(io.BytesIO(window.page.screenshot()))
    small = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    written = io.BytesIO()
    small.save(written, "PNG", optimize=True)
    return written.getvalue()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(new_window: NewWindow, board: str, flowing: Stage, name: str) -> None:
    path = PICTURES[name]
    window = new_window(board, WIDTH, HEIGHT)
    for scheme in ("light", "dark"):
        window.page.emulate_media(color_scheme=scheme)
        with flowing.writing() if name == "request" else contextlib.nullcontext():
            window.open(path if isinstance(path, str) else path(flowing))
            if name == "request":
                window.page.locator("#live_tokens pre").wait_for()
            picture = taken(window)
        assert len(picture) < MOST_BYTES
        if folder := os.environ.get("TOKENYARD_TEST_PICTURES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}-{scheme}.png").write_bytes(picture)


def test_the_page_of_the_board_shows_every_picture() -> None:
    page = (ROOT / "docs" / "board.md").read_text(encoding="utf-8")
    names = {f"board/{name}-{scheme}.png" for name in PICTURES for scheme in ("light", "dark")}
    assert set(re.findall(r'"(board/[^"]+\.png)"', page)) == names
    assert all((ROOT / "docs" / name).is_file() for name in names)
