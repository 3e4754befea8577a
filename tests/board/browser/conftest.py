"""Headless Chromium, one for all tests, with a new profile for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.board.browser.serving import serve
from tests.board.browser.stage import Stage, staged
from tests.board.browser.window import Window
from tests.support.absence import imported, lacks
from tests.support.servers import Server, find_binary

NewWindow = Callable[..., Window]
_NO_DRIVER = "Playwright is missing (tests/board/requirements.txt): no page was seen"
_NO_BROWSER = "Chromium is missing (Debian: apt install chromium): no page was seen"
#: Without a screen, and as root in a container; what the browser does by itself is off.
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


@pytest.fixture(scope="package")
def chromium(no_leftover_processes: None) -> Iterator[Any]:
    """The browser; its absence is loud, and a failure in CI.

    It ends with the last of these tests: its driver has an event loop running in this thread, where
    others could have none.
    """
    driver = imported("playwright.sync_api", _NO_DRIVER)
    program = shutil.which("chromium")
    if program is None:
        lacks(_NO_BROWSER)
    with driver.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def new_window(chromium: Any) -> Iterator[NewWindow]:
    """Opens windows on a board: ``new_window(url, width=360)``.

    At the end of the test no page may have done what it must not.
    """
    contexts: list[Any] = []
    windows: list[Window] = []

    def new(board: str, width: int = 1280, height: int = 800, **options: Any) -> Window:
        size = {"width": width, "height": height}
        contexts.append(chromium.new_context(viewport=size, locale="en-GB", **options))
        windows.append(Window(contexts[-1].new_page(), board))
        return windows[-1]

    yield new
    for context in contexts:
        context.close()
    assert [fault for window in windows for fault in window.faults] == []


@pytest.fixture(scope="session")
def stage(no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The live yard of all tests that do not kill its parts, on a server of its own."""
    folder = tmp_path_factory.mktemp("stage")
    broker = Server("valkey", find_binary("valkey"), folder, aof=True)
    broker.start()
    with staged(broker, folder, with_vllm=True, name="main") as running:
        running.fill()
        yield running
    broker.stop()


@pytest.fixture(scope="session")
def speaking(stage: Stage) -> Stage:
    """The same, once vLLM serves and has been asked."""
    stage.speak()
    return stage


@pytest.fixture(scope="session")
def board(stage: Stage) -> str:
    """The URL of a board without keys, which shows prompts and answers."""
    return serve(stage.plant, content="viewer")


@pytest.fixture
def window(new_window: NewWindow, board: str) -> Window:
    """A window of usual size on `board`."""
    return new_window(board)
