"""What an open page does by itself, on a page of the test's own: `board.js` without a yard."""

from __future__ import annotations

import importlib.resources
import queue
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.window import Window

pytestmark = pytest.mark.long

PAGE = """<!doctype html><html lang="en"><title>x</title>
<p id="live_error" class="told bad" role="status" hidden></p>
<input id="why" value="">
<section id="live_rows" data-live>{rows}</section>
<section id="live_text" data-live><pre data-follow>one</pre></section>
<script>{script}</script>"""
ROW = (
    '<tr><td><input type="checkbox" name="id" value="{0}"></td><td><a href="#{0}">{0}</a></td></tr>'
)


def table(*names: str) -> str:
    """Rows as a page of the board has them."""
    return f"<table><tbody>\n{''.join(ROW.format(one) for one in names)}\n</tbody></table>"


class Played:
    """A server of one page whose live blocks come when the test says so."""

    def __init__(self) -> None:
        self.events: queue.Queue[str | None] = queue.Queue()
        self.streams = 0
        self.is_away = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def send(self, block: str, html: str) -> None:
        """Send a live block to the open page."""
        data = "".join(f"data: {line}\n" for line in html.split("\n"))
        self.events.put(f"event: {block}\n{data}\n")

    def cut(self) -> None:
        """End the stream."""
        self.events.put(None)

    def close(self) -> None:
        """Stop serving."""
        self.cut()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        played = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "event-stream" not in self.headers.get("accept", ""):
                    self._page()
                elif played.is_away:
                    self.send_error(503)
                else:
                    self._stream()

            def do_HEAD(self) -> None:
                self.send_response(200)
                self.end_headers()

            def _page(self) -> None:
                script = importlib.resources.files("tokenyard.board") / "static" / "board.js"
                rows = table("a", "b", "c")
                body = PAGE.format(rows=rows, script=script.read_text(encoding="utf-8")).encode()
                self.send_response(200)
                self.send_header("content-type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(body)

            def _stream(self) -> None:
                played.streams += 1
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b"retry: 100\nevent: live_error\ndata: \n\n")
                self.wfile.flush()
                while (event := played.events.get()) is not None:
                    self.wfile.write(event.encode())
                    self.wfile.flush()

            def log_message(self, *_: object) -> None: ...

        return Handler


@pytest.fixture
def played() -> Iterator[Played]:
    server = Played()
    yield server
    server.close()


@pytest.fixture
def page(new_window: NewWindow, played: Played) -> Any:
    """The page, with its stream open."""
    window: Window = new_window(played.url)
    window.page.goto(played.url)
    wait_for(window.page, lambda: played.streams == 1)
    return window.page


def rows(page: Any) -> list[str]:
    found: list[str] = page.locator("#live_rows a").all_inner_texts()
    return found


def wait_for(page: Any, check: Callable[[], bool]) -> None:
    """Let the page work until something is so."""
    for _ in range(1500):
        if check():
            return
        page.wait_for_timeout(20)
    raise AssertionError("the page did not get there")


def test_rows_come_and_go_and_checked_ones_stay_checked(page: Any, played: Played) -> None:
    page.locator("[value=b]").check()
    page.mouse.move(600, 600)

    played.send("live_rows", table("new", "a", "b"))
    wait_for(page, lambda: rows(page) == ["new", "a", "b"])
    assert page.locator("input:checked").evaluate_all("(all) => all.map((one) => one.value)") == [
        "b"
    ]

    played.send("live_rows", table("new", "c"))  # and no other takes the check over
    wait_for(page, lambda: rows(page) == ["new", "c"])
    assert page.locator("input:checked").count() == 0


def test_the_focus_stays_on_its_row(page: Any, played: Played) -> None:
    page.locator("[value=b]").focus()
    played.send("live_rows", table("x", "y", "b", "c"))
    wait_for(page, lambda: rows(page) == ["x", "y", "b", "c"])
    assert page.evaluate("document.activeElement.value") == "b"

    played.send("live_rows", table("x"))
    wait_for(page, lambda: rows(page) == ["x"])
    assert page.evaluate("document.activeElement.id") == "live_rows"


def test_nothing_moves_under_the_pointer(page: Any, played: Played) -> None:
    page.locator("a", has_text="b").hover()
    played.send("live_rows", table("x", "y"))
    page.wait_for_timeout(600)
    assert rows(page) == ["a", "b", "c"]

    page.mouse.move(600, 600)
    wait_for(page, lambda: rows(page) == ["x", "y"])


def test_text_that_grows_keeps_the_selection(page: Any, played: Played) -> None:
    page.evaluate("""() => {
        const text = document.querySelector("pre").firstChild;
        getSelection().setBaseAndExtent(text, 0, text, 3);
    }""")
    played.send("live_text", "<pre data-follow>one two</pre>")
    wait_for(page, lambda: page.locator("pre").inner_text() == "one two")
    assert page.evaluate("getSelection().toString()") == "one"


def test_a_form_keeps_what_was_typed(page: Any, played: Played) -> None:
    page.locator("#why").fill("because")
    played.send("live_rows", table("x"))
    wait_for(page, lambda: rows(page) == ["x"])
    assert page.locator("#why").input_value() == "because"


def test_it_tells_when_the_board_is_away_and_when_it_is_back(page: Any, played: Played) -> None:
    banner = page.locator("#live_error")
    assert not banner.is_visible()
    played.is_away = True
    played.cut()
    banner.filter(has_text="does not answer").wait_for(timeout=30_000)

    played.is_away = False

    banner.filter(has_text="Up to date again").wait_for(timeout=30_000)
    banner.wait_for(state="hidden", timeout=30_000)


def test_it_shows_what_the_board_says_of_the_broker(page: Any, played: Played) -> None:
    banner = page.locator("#live_error")
    played.send("live_error", "The broker is <b>away</b>.")
    banner.filter(has_text="The broker is <b>away</b>.").wait_for()

    played.send("live_error", "")

    banner.filter(has_text="Up to date again").wait_for()


def test_a_stream_that_ends_by_itself_is_not_worth_a_word(page: Any, played: Played) -> None:
    played.cut()
    wait_for(page, lambda: played.streams == 2)
    assert not page.locator("#live_error").is_visible()


def test_a_hidden_page_has_no_stream(page: Any, played: Played) -> None:
    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", {value: true, configurable: true});
        document.dispatchEvent(new Event("visibilitychange", {bubbles: true}));
    }""")
    played.cut()
    page.wait_for_timeout(500)
    assert played.streams == 1

    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", {value: false, configurable: true});
        document.dispatchEvent(new Event("visibilitychange", {bubbles: true}));
    }""")
    wait_for(page, lambda: played.streams == 2)


def test_what_an_action_has_done_is_told_once(new_window: NewWindow, played: Played) -> None:
    window = new_window(played.url)
    window.page.goto(f"{played.url}/?page=2&done=1-0")
    wait_for(window.page, lambda: window.page.url == f"{played.url}/?page=2")
