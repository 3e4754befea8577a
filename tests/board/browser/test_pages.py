"""Each page on a live yard: what it says, who can use it, and that it fits every screen."""

from __future__ import annotations

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.window import Window
from tokenyard.board.pages import PAGES

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

#: The pages of the menu.
MENU = [page for page in PAGES if page.menu]
PATHS = [page.path for page in MENU]


@pytest.mark.parametrize("page", MENU, ids=[page.menu for page in MENU])
def test_a_page_is_whole_in_every_look(window: Window, page: object) -> None:
    assert window.open(page.path).status == 200
    assert window.page.title().startswith(page.title)
    assert window.page.locator("h1").count() == 1
    assert window.page.locator("nav [aria-current=page]").inner_text() == page.menu

    for scheme in ("light", "dark"):
        window.page.emulate_media(color_scheme=scheme)
        assert window.axe() == []
    for width in (360, 390, 768, 2560):
        window.page.set_viewport_size({"width": width, "height": 800})
        assert window.sticks_out() == []
        if width < 480:  # a phone's: nothing is beside the screen, as columns would be
            assert window.cut_tables() == []


def test_the_menu_opens_on_a_narrow_screen_without_a_script(
    new_window: NewWindow, board: str
) -> None:
    window = new_window(board, width=360, java_script_enabled=False)
    window.open("/")
    link = window.page.get_by_role("link", name="Requests", exact=True)
    assert not link.is_visible()

    window.page.get_by_role("button", name="Menu").click()
    link.click()

    assert window.path == "/requests"


def test_pages_are_read_without_a_script(new_window: NewWindow, window: Window, board: str) -> None:
    without = new_window(board, java_script_enabled=False)
    for path in PATHS:
        window.open(path)
        without.open(path)
        seen, read = (
            one.page.locator("h1, h2, caption").all_inner_texts() for one in (window, without)
        )
        assert seen[0] == read[0]
        assert len(seen) == len(read), path


def test_the_keyboard_reaches_the_content_and_shows_where_it_is(window: Window) -> None:
    window.open("/requests")
    page = window.page
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    assert skip.evaluate("(one) => one === document.activeElement")
    assert skip.bounding_box()["y"] >= 0
    assert skip.evaluate("(one) => getComputedStyle(one).outlineStyle") == "solid"

    page.keyboard.press("Enter")

    assert page.locator("main").evaluate("(one) => one === document.activeElement")


def test_back_and_reload_show_the_pages_again(window: Window) -> None:
    window.open("/")
    window.follow("Requests")
    window.follow("Devices")

    window.page.go_back()

    assert window.path == "/requests"
    assert window.page.reload().status == 200
    window.page.go_back()
    assert window.path == "/"
