"""Where a request comes from: hosts, origins, and what browsers are told."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.board.asking import HERE, HOST, Answer, Asking
from tests.board.keyed import keyed
from tests.support.servers import Server
from tokenyard.board.forms import read_back
from tokenyard.board.operations import OPERATIONS
from tokenyard.board.page import Actor, Parameters
from tokenyard.protocol.keys import Yard

DEED = f"/board/do/{next(iter(OPERATIONS))}"


def is_let_in(answer: Answer) -> bool:
    """Whether it has passed the guard: what is missing is told by the action itself."""
    return answer.status in {200, 303, 400, 404} and "another page" not in answer.body


# Hosts


@pytest.mark.parametrize(
    "host", [HOST, "127.0.0.1", "localhost", "LOCALHOST:8001", "[::1]", "[::1]:8001", "localhost:1"]
)
def test_it_is_known_on_loopback(ask: Asking, host: str) -> None:
    assert ask("/board/", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8001", "127.0.0.1.evil.example", "localhost.evil.example"),
        *("evil.example#localhost", "evil.example/localhost", "user@localhost", "localhost@evil"),
        *("localhost.", "xlocalhost", "localhost:", "localhost:x", "localhost:8001:8001", "::1"),
        *("[::1", "[::2]", "0.0.0.0", "127.0.0.2", "127.1", "2130706433", "0x7f.1", "", " ", "*"),
        *(
            "localhost,evil.example",
            "localhost evil.example",
            "l\u00f6calhost",
            "localhost\\",
            "null",
        ),
        *("localhost:99999999999", "localhost:-1", "x" * 60_000),
    ],
)
def test_it_is_known_by_no_other_name(ask: Asking, host: str) -> None:
    for verb in ("GET", "POST", "DELETE"):
        answer = ask("/board/", verb, host=host, origin=f"http://{host}")
        assert answer.status in {400, 403}, verb
        assert "<html" not in answer.body


def test_one_host_is_needed_and_one_only(ask: Asking) -> None:
    good, evil = (b"host", HOST.encode()), (b"host", b"evil.example")
    for headers in ([], [good, good], [good, evil], [evil, good], [(b"x-forwarded-host", b"x")]):
        answer = ask("/board/", raw_headers=headers or [(b"accept", b"*/*")])
        assert answer.status == 400, headers


def test_with_keys_any_name_will_do_unless_names_are_given(broker: Server, bare: Yard) -> None:
    with keyed(broker.url, bare) as door:
        assert door.ask("/board/login", host="any.example").status == 200
        assert door.ask("/board/login", host="any example").status == 400
    with keyed(broker.url, bare, hosts=("board.example",)) as door:
        for host, status in {
            "board.example": 200,
            "BOARD.example:8443": 200,
            "localhost": 200,
            "any.example": 403,
            "x.board.example": 403,
            "board.example.evil": 403,
        }.items():
            assert door.ask("/board/login", host=host).status == status, host


# Origins


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (HOST, HERE),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("localhost", "http://localhost:80"),
        ("localhost", "https://localhost"),  # by a proxy's TLS, of which nothing is known
        ("localhost:443", "https://localhost"),
        ("LOCALHOST:8001", "http://localhost:8001"),
        ("[::1]:8001", "http://[::1]:8001"),
    ],
)
def test_a_page_of_the_board_may_act(ask: Asking, host: str, origin: str) -> None:
    answer = ask(DEED, "POST", form={}, host=host, origin=origin)
    assert is_let_in(answer), answer


ELSEWHERE = [
    *(None, "", "null", "NULL", "*", "http://", "//127.0.0.1:8001", HOST, "file://", "about:blank"),
    *("http://127.0.0.1", "http://127.0.0.1:8002", "http://localhost:8001", "http://[::1]:8001"),
    *("https://127.0.0.1:8443", "ftp://127.0.0.1:8001", "chrome-extension://127.0.0.1:8001"),
    *("http://evil.example", f"http://{HOST}.evil.example", f"http://evil.example@{HOST}"),
    *(f"http://{HOST}@evil.example", f"http://{HOST}:8001", f"http://x.{HOST}", f"{HERE}/"),
    *(f"{HERE}/board/", f"{HERE}#", f"{HERE}?", f"{HERE} {HERE}", f"{HERE},{HERE}", f" {HERE}"),
    *(
        f"http:/{HOST}",
        f"http:///{HOST}",
        f"http:\\\\{HOST}",
        f"{HERE}\\",
        f"{HERE}\x00",
        "http://é",
    ),
    "http://" + "x" * 60_000,
]


@pytest.mark.parametrize("verb", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "post"])
def test_a_page_from_elsewhere_may_not_act_whatever_its_verb(ask: Asking, verb: str) -> None:
    for origin in ELSEWHERE:
        answer = ask(DEED, verb, form={}, origin=origin)
        assert answer.status == 403, repr(origin)[:40]
        assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-methods" not in answer.headers


def test_one_origin_is_needed_and_one_only(ask: Asking) -> None:
    host, origin = (b"host", HOST.encode()), (b"origin", HERE.encode())
    answer = ask(DEED, "POST", raw_headers=[host, origin, (b"origin", b"http://evil.example")])
    assert answer.status == 403
    assert ask(DEED, "POST", raw_headers=[host, origin, origin]).status == 403


def test_without_keys_a_header_of_authorization_is_no_way_around_the_origin(ask: Asking) -> None:
    assert ask(DEED, "POST", form={}, origin=None, authorization="Bearer x").status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_from_elsewhere_may_lead_here_and_not_embed_what_is_here(
    ask: Asking, site: str
) -> None:
    link = {"sec_fetch_site": site, "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert ask("/board/", **link).status == 200
    for change in (
        {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
        {"sec_fetch_mode": "cors", "sec_fetch_dest": "empty"},
        {"sec_fetch_dest": "iframe"},
        {"sec_fetch_dest": "object"},
        {"sec_fetch_mode": None},
    ):
        parts: dict[str, Any] = link | change
        assert ask("/board/", **parts).status == 403, change
        assert ask("/board/", accept="text/event-stream", **parts).status == 403, change
    assert ask(DEED, "POST", form={}, **link).status == 403
    for own in ("same-origin", "none"):
        assert ask("/board/", sec_fetch_site=own).status == 200


# What browsers are told


@pytest.mark.parametrize(
    ("path", "verb", "headers"),
    [
        ("/board/", "GET", {}),
        ("/board", "GET", {}),
        ("/board/", "HEAD", {}),
        ("/board/nothing", "GET", {}),
        ("/board/", "PUT", {}),
        ("/board/", "POST", {"origin": None}),
        ("/board/", "GET", {"host": "evil.example"}),
        ("/board/audit", "GET", {"accept": "text/event-stream"}),
        ("/board/static/board.js", "GET", {}),
        ("/board/static/nothing.js", "GET", {}),
        ("/board/a%0Ab", "GET", {}),
        ("/elsewhere", "GET", {}),
    ],
)
def test_each_answer_has_the_headers_of_safety(
    ask: Asking, path: str, verb: str, headers: dict[str, Any]
) -> None:
    answer = ask(path, verb, most_bytes=1, **headers)
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["form-action"] == policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'nonce-[\w-]{22}'", policy["script-src"])
    assert policy["style-src"] == policy["script-src"]
    assert "unsafe" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    is_file = answer.status == 200 and "/static/" in path
    assert answer.headers["cache-control"] == ("no-cache" if is_file else "no-store")
    assert "server" not in answer.headers


def test_each_answer_has_a_nonce_of_its_own_which_its_page_knows(ask: Asking) -> None:
    found = set()
    for _ in range(3):
        answer = ask("/board/audit")
        (nonce,) = re.findall(
            r"script-src 'nonce-([^']+)'", answer.headers["content-security-policy"]
        )
        assert set(re.findall(r'nonce="([^"]+)"', answer.body)) == {nonce}
        found.add(nonce)
    assert len(found) == 3


def test_a_file_is_asked_for_again_and_not_sent_again(ask: Asking) -> None:
    first = ask("/board/static/board.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = ask("/board/static/board.js", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, "")


# The page to go back to


@pytest.mark.parametrize(
    "back",
    [
        *(
            "",
            "http://evil.example",
            "//evil.example",
            "/board//evil.example",
            "/boardx/",
            "/v1/models",
        ),
        *("/board/../v1/models", "/board/./x", "/board/%2e%2e/v1", "/board/.%2E/v1", "/board/x/.."),
        *(
            "/board/\\evil.example",
            "/board/x\r\nset-cookie: a=b",
            "/board/x y",
            "/board/é",
            "/board/#",
        ),
        *(
            "/board/\x00",
            "javascript:alert(1)",
            "/board/<script>",
            "https:/board/",
            "/board/x?\n=1",
        ),
        *("\\board", "\t//evil.example", "/board", "/BOARD/", "/board/x?q=<b>", "/board/x?a#b"),
    ],
)
def test_back_leads_to_a_page_of_the_board(back: str) -> None:
    assert read_back(Parameters({"back": [back]}, Actor("", "viewer"))) == "/board/"


@pytest.mark.parametrize(
    ("back", "kept"),
    [
        ("/board/dead", "/board/dead"),
        ("/board/request?client=a%2Fb&id=%0A", "/board/request?client=a%2Fb&id=%0A"),
        ("/board/dead?done=1-1&page=2&done=", "/board/dead?page=2"),
        ("/board/dead?q=//x/../y&e=", "/board/dead?q=%2F%2Fx%2F..%2Fy&e="),
        ("/board/requests/a/..b", "/board/requests/a/..b"),
    ],
)
def test_back_keeps_what_was_asked_there(back: str, kept: str) -> None:
    assert read_back(Parameters({"back": [back]}, Actor("", "viewer"))) == kept
