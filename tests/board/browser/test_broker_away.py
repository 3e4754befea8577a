"""The broker dies under an open page, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.serving import serve
from tests.support.processes import Plant
from tests.support.servers import Server, find_binary

pytestmark = pytest.mark.long


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    server = Server("valkey", find_binary("valkey"), tmp_path, aof=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def board(mortal: Server) -> Iterator[str]:
    with Plant(mortal.url) as plant:
        plant.coordinator()
        plant.wait_for_leader()
        yield serve(plant)


def test_an_open_page_says_that_the_broker_is_away_and_when_it_is_back(
    new_window: NewWindow, board: str, mortal: Server
) -> None:
    window = new_window(board)
    window.open("/requests")
    banner = window.page.locator("#live_error")
    window.page.get_by_label("Client", exact=True).fill("half a na")

    mortal.kill()
    banner.filter(has_text="trying again").wait_for()
    mortal.start()
    banner.filter(has_text="Up to date again").wait_for()

    assert window.page.get_by_label("Client", exact=True).input_value() == "half a na"


def test_a_page_that_could_not_be_read_comes_by_itself_once_the_broker_is_back(
    new_window: NewWindow, board: str, mortal: Server
) -> None:
    window = new_window(board)
    mortal.kill()
    assert window.open("/requests").status == 503
    assert "The broker is away" in window.text()

    mortal.start()

    window.wait_for_text("No request waits or runs")
