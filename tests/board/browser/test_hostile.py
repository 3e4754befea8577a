"""Markup, control characters and right-to-left marks in every field are shown as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.serving import serve
from tests.board.hostile_yard import EVIL, MOST_BYTES, NOWHERE, write_hostile_yard
from tests.cli.test_hostile_text import moves
from tests.support.builders import entry_fields, make_request
from tests.support.processes import Plant
from tests.support.servers import Server

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def evil(shared_server: Any) -> Iterator[tuple[Plant, str, list[str]]]:
    """A yard in which every text of a client is hostile, and a board that shows all of it."""
    server: Server = shared_server("valkey")
    with Plant(server.url) as plant:
        plant.coordinator()
        plant.wait_for_leader()
        paths = write_hostile_yard(plant)
        yield plant, serve(plant, content="viewer"), [*paths, *NOWHERE]


def test_every_text_of_a_client_is_shown_as_text(
    new_window: NewWindow, evil: tuple[Plant, str, list[str]]
) -> None:
    _, url, paths = evil
    window = new_window(url, width=360)
    shown = 0
    for path in paths:
        answer = window.open(path)
        body = answer.text()
        assert len(body) < MOST_BYTES, path
        assert window.page.title() != "owned", path
        assert window.page.locator("main mark, main img, main script").count() == 0, path
        assert moves(window.page.locator("body").inner_text()) == [], path
        assert answer.status in {200, 400, 404}, path
        assert window.sticks_out() == [], path
        shown += "<script>" in window.text()
    assert shown >= 8  # as text, on most pages


def test_updates_show_it_as_text_too(
    new_window: NewWindow, evil: tuple[Plant, str, list[str]]
) -> None:
    plant, url, _ = evil
    window = new_window(url)
    window.open("/requests")
    more = make_request("more" + EVIL, client="evil", prompt=EVIL, model="m" + EVIL)
    plant.connection.xadd(plant.keys.intake("low"), entry_fields(more))

    window.wait_for_text("more\"'><script>")

    assert window.page.locator("main mark, main img, main script").count() == 0
