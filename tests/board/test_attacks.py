"""What hostile clients try: paths, parameters, forms, and holding on to what others need."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.board.asking import HERE, Asking, opened
from tests.support.servers import Server
from tokenyard.board import app
from tokenyard.board.operations import OPERATIONS
from tokenyard.board.page import MAX_PARAMETER, Page, Parameters
from tokenyard.board.pages import PAGES
from tokenyard.protocol.keys import Keys, Yard

#: What is put wherever the board takes a text.
HOSTILE = (
    "",
    " ",
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "\x00\x01\x1b[31m\r\nset-cookie: a=b\r\n\r\n",
    "\u202eevil\u2066\u200f\u2028\u2029\ufeff\ud7ff",
    "%00%0d%0a%ff%2e%2e",
    "../../../../etc/passwd",
    "*",
    "(1-1",
    "+",
    "-1",
    "0",
    "99999999999999999999",
    "18446744073709551615-18446744073709551615",
    "1-1",
    "0-0",
    "1e400",
    "nan",
    "٣",
    "9999-12-31T23:59",
    "0000-00-00",
    "on",
    "all",
    "a/b:c@d",
    "x" * MAX_PARAMETER,
    "\U0001f4a9" * 1000,
)
#: Those that a page may take for a number, a time, a name of an entry or a place in a list.
TRICKY = ("", "<script>alert(1)</script>", "\x00\r\n", "0-0", "-1", "99999999999999999999", "1e400")
TRICKY += ("0000-00-00", "9999-12-31T23:59", "\u0663", "x" * MAX_PARAMETER)


def names_of_parameters() -> list[str]:
    """All names that the code of the pages asks for."""
    texts = [file.read_text() for file in Path(app.__file__).parent.rglob("*.py")]
    asked = r'\.(?:text|texts|whole|one_of)\(\s*"(\w+)"'
    return sorted({name for text in texts for name in re.findall(asked, text)})


def with_parameters(page: Page, text: str) -> str:
    """The page's path with a text in each of its places."""
    return "/board" + re.sub(r"\{\w+(:path)?\}", lambda _: quote(text, safe=""), page.path)


# Paths


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/board/../v1/models",
            "/board/%2e%2e/v1/models",
            "/board/..%2fv1",
            "/board//",
            "/board///x",
        ),
        *("//board/", "/board/./", "/board/%00", "/board/%0d%0aset-cookie:a=b", "/board/%ff"),
        *(
            "/board/%5c%5cevil.example",
            "/board//evil.example",
            "/board/do",
            "/board/do/",
            "/boardx",
        ),
        *("/board/do/nothing", "/board/do/..%2f..%2fv1", "/board/" + "x/" * 2000, "/BOARD/", "/"),
        *("/board/static", "/board/static/", "/board/login/", "/board;/", "*", "board", ""),
        *("/board/%E2%80%AE", "/board/login%00", "/board/audit%2f", "/board/audit;a=b"),
    ],
)
def test_no_path_leads_out_of_the_board_or_breaks_it(ask: Asking, path: str) -> None:
    for verb in ("GET", "HEAD", "POST", "PUT"):
        answer = ask(path, verb)
        assert answer.status in {200, 308, 400, 404, 405}, (verb, answer)
        assert not re.search(r"[^ -~]", answer.location)
        if answer.location:
            assert re.match(r"/board/?[^/]?", answer.location), answer.location
            assert not answer.location.startswith("//")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../app.py",
            "..%2fapp.py",
            "%2e%2e/app.py",
            "%2e%2e%2fapp.py",
            "..%5capp.py",
            "/etc/passwd",
        ),
        *(
            "%2fetc%2fpasswd",
            "//etc/passwd",
            "....//app.py",
            "board.js/../../app.py",
            "%00",
            "board.js%00",
        ),
        *("..", ".", "", "x" * 5000, "board.js/", "../templates/base.html", "../../../README.md"),
        *("%c0%ae%c0%ae/app.py", "../static/../app.py", "../__init__.py"),
    ],
)
def test_no_path_leads_out_of_the_folder_of_files(ask: Asking, name: str) -> None:
    answer = ask(f"/board/static/{name}")
    assert answer.status in {200, 404}
    if answer.status == 200:  # a way back into the folder
        assert "{% extends" not in answer.body
        assert "import annotations" not in answer.body
    assert "root:" not in answer.body


def test_the_files_are_only_read(ask: Asking) -> None:
    for verb in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask("/board/static/board.js", verb).status == 405


# Parameters


@pytest.mark.long
def test_no_page_breaks_at_hostile_parameters(ask: Asking) -> None:
    names = names_of_parameters()
    assert {"before", "done"} <= set(names)
    for page in PAGES:
        for text in HOSTILE:
            query = "&".join(f"{name}={quote(text, safe='')}" for name in names)
            answer = ask(f"{with_parameters(page, text or 'x')}?{query}")
            seen = (page.path, text[:50], answer.status)
            assert answer.status in {200, 400, 404}, seen
            assert "<script>alert" not in answer.body, seen
            assert "<img src=x" not in answer.body, seen
            assert "set-cookie" not in answer.headers
            if text == "{{ 7 * 7 }}{% raw %}":
                assert "49" not in re.findall(r'value="([^"]*)"', answer.body), seen


@pytest.mark.long
@pytest.mark.parametrize("name", names_of_parameters())
def test_no_page_breaks_at_one_hostile_parameter(ask: Asking, name: str) -> None:
    """Alone, since with others the first that is wrong ends it."""
    for page in PAGES:
        if "{" in page.path:
            continue
        for text in TRICKY:
            answer = ask(f"/board{page.path}?{name}={quote(text, safe='')}")
            assert answer.status in {200, 400, 404}, (page.path, text)


@pytest.mark.long
def test_no_action_breaks_at_hostile_fields(ask: Asking) -> None:
    names = [name for name in names_of_parameters() if name != "all"]
    for action in OPERATIONS:
        for text in HOSTILE:
            form = dict.fromkeys(names, text)
            query = "&".join(f"{name}={quote(text, safe='')}" for name in names)
            for answer in (
                ask(f"/board/do/{action}?{query}"),
                ask(f"/board/do/{action}", "POST", form=form),
            ):
                seen = (action, text[:50], answer.status, answer.body[-300:])
                assert answer.status in {200, 303, 400, 404}, seen
                assert "<script>alert" not in answer.body, seen
                assert not re.search(r"[^ -~]", answer.location), seen


def test_a_form_has_bounds(ask: Asking) -> None:
    path = f"/board/do/{next(iter(OPERATIONS))}"
    large = ask(path, "POST", form={"x": ["y" * 1000] * 300})
    assert (large.status, "more than 262144 bytes" in large.body) == (400, True)
    many = ask(path, "POST", form={"x": ["y"] * 2001})
    assert (many.status, "more than 2000 fields" in many.body) == (400, True)
    long = ask(path, "POST", form={"x": "y" * (MAX_PARAMETER + 1)})
    assert (long.status, "more than 10000 characters" in long.body) == (400, True)
    assert ask("/board/audit?" + "x=&" * 3000).status == 400
    assert ask("/board/audit?before=" + "x" * (MAX_PARAMETER + 1)).status == 400


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "application/json", "", None]
)
def test_a_form_comes_as_forms_do(ask: Asking, kind: str | None) -> None:
    path = f"/board/do/{next(iter(OPERATIONS))}"
    answer = ask(path, "POST", form={"a": "b"}, content_type=kind)
    assert (answer.status, "send the form as" in answer.body) == (400, True)


def test_a_mistake_of_ours_is_told_to_the_log_only(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broker: Server,
    keys: Keys,
) -> None:
    def view(yard: Yard, given: Parameters) -> dict[str, Any]:
        raise RuntimeError("a secret of the inside")

    page = Page("/broken", "Broken", "audit.html", view)
    monkeypatch.setattr(app, "PAGES", [page])
    with opened(broker.url, keys.yard) as ask:
        answer = ask("/board/broken")
    assert answer.status == 500
    assert "secret" not in answer.body
    assert "Traceback" not in answer.body
    assert "a secret of the inside" in caplog.text
    assert "content-security-policy" in answer.headers


# On a socket, where the server reads first


@pytest.mark.parametrize(
    ("head", "statuses"),
    [
        (f"GET {HERE}/board/ HTTP/1.1\r\nHost: {{host}}", {200}),
        ("GET http://evil.example/board/ HTTP/1.1\r\nHost: {host}", {200}),
        ("GET http://{host}/board/ HTTP/1.1\r\nHost: evil.example", {403}),
        ("GET /board/ HTTP/1.1\r\nHost: {host}\r\nHost: evil.example", {400}),
        ("GET /board/ HTTP/1.1\r\nHost: evil.example\r\nHost: {host}", {400}),
        ("GET /board/ HTTP/1.1\r\nHost : {host}", {400}),
        ("GET /board/ HTTP/1.1\r\nX: y", {400}),
        ("GET /board/ HTTP/1.0", {400}),
        ("GET /board/../v1 HTTP/1.1\r\nHost: {host}", {404}),
        ("POST http://{host}/board/do/x HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0", {403}),
        ("OPTIONS * HTTP/1.1\r\nHost: {host}", {400, 403}),
        ("CONNECT {host} HTTP/1.1\r\nHost: {host}", {400, 403}),
        ("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}", {400, 405}),
        ("TRACE /board/ HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}", {405}),
        ("GET /board/ HTTP/1.1\r\nHost: {host}\r\nX: " + "y" * 70_000, {400, 431}),
        ("GET /board/?" + "y" * 70_000 + " HTTP/1.1\r\nHost: {host}", {400, 414, 431}),
    ],
    ids=lambda one: one[:60] if isinstance(one, str) else "",
)
def test_a_socket(served: str, head: str, statuses: set[int]) -> None:
    host, _, port = served.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as client:
        client.sendall(head.replace("{host}", served).encode() + b"\r\nConnection: close\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                answer += piece
    assert int(answer.split()[1]) in statuses, answer[:500]
    assert b"evil.example" not in answer
    assert answer.startswith(b"HTTP/1.1 ")
