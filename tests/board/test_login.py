"""Keys and the page of the login, and a board that asks for none."""

from __future__ import annotations

import asyncio

import pytest

from tests.board.asking import Asking, opened
from tests.board.deeds import Deeds
from tests.board.keyed import Keyed
from tests.support.api_keys import create_key
from tokenyard.board import access
from tokenyard.board.operations import OPERATIONS
from tokenyard.protocol.api_keys import ApiKey, encode_key, key_digest
from tokenyard.protocol.keys import Keys

pytestmark = pytest.mark.usefixtures("quick_refusals")


def test_a_bounded_number_of_lookups_is_kept(monkeypatch: pytest.MonkeyPatch, door: Keyed) -> None:
    monkeypatch.setattr(access, "_MOST_KNOWN", 3)
    for number in range(10):
        assert door.ask("/board/", authorization=f"Bearer guess-{number}").status == 401
    assert len(door.ask.board._door._known) <= 3


def test_a_lookup_is_used_again_for_two_seconds_at_most() -> None:
    assert access.TRUSTED_S <= 2.0


def test_only_a_key_with_a_role_opens_the_board(door: Keyed) -> None:
    tenants, _ = create_key(door.yard, "research")
    both, _ = create_key(door.yard, "research", role="viewer")
    odd = {
        "ty-broken": b"\xff{",
        "ty-strange": b'{"role":"owner","tenant":"a"}',
        "ty-nothing": encode_key(ApiKey()),
    }
    for key, packed in odd.items():
        door.yard.connection.hset(door.yard.keys.api_keys, key_digest(key), packed)
    assert door.log_in_with(both).status == 303
    digest = key_digest(door.secrets["admin"])
    hostile = ["", " ", "*", "ty-", digest, digest[:12], "x" * 513, "x" * 10_000, "é\x00\n"]
    for key in (tenants, *odd, *hostile):
        answer = door.log_in_with(key)
        assert (answer.status, answer.cookies) == (401, []), key[:80]
        if key.isascii() and key.isprintable():
            assert door.ask("/board/", authorization=f"Bearer {key}").status == 401, key[:80]
    assert door.log_in_with(door.secrets["admin"] + "\n").status == 303  # pasted with its line end


def test_a_program_shows_its_key_and_then_no_cookie_counts(deeds: Deeds, door: Keyed) -> None:
    cookie = door.log_in("admin")
    bearer = f"Bearer {door.secrets['viewer']}"
    assert door.ask("/board/", authorization=bearer).status == 200
    assert door.ask("/board/", authorization="Bearer wrong", cookie=cookie).status == 401
    assert door.ask("/board/", authorization="Basic YTpi", cookie=cookie).status == 401
    name = next(name for name, action in OPERATIONS.items() if action.role != "viewer")
    for authorization in (bearer, "Bearer wrong", ""):
        shown = {"origin": None, "authorization": authorization, "cookie": cookie}
        answer = door.ask(f"/board/do/{name}", "POST", form={}, **shown)
        assert answer.status in {401, 403}


def test_a_program_needs_no_origin(deeds: Deeds, door: Keyed) -> None:
    name = next(iter(OPERATIONS))
    more = {"origin": None, "authorization": f"Bearer {door.secrets['admin']}"}
    assert door.ask(f"/board/do/{name}", "POST", form={}, **more).status == 303
    # But with one, it must be the board's.
    more["origin"] = "http://evil.example"
    assert door.ask(f"/board/do/{name}", "POST", form={}, **more).status == 403
    assert deeds.done == [name]


def test_wrong_keys_have_to_wait_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch, door: Keyed
) -> None:
    monkeypatch.setattr(access, "_REFUSED_AFTER_S", 1.0)
    headers = [(b"host", door.ask.host.encode()), (b"authorization", b"Bearer wrong")]

    async def guess() -> list[int]:
        asked = [door.ask.ask("GET", "/board/", headers) for _ in range(40)]
        return sorted(answer.status for answer in await asyncio.gather(*asked))

    assert asyncio.run(guess()) == [401] * 16 + [429] * 24
    assert door.log_in("viewer")


def test_without_keys_everybody_on_loopback_is_an_admin(ask: Asking) -> None:
    answer = ask("/board/")
    assert answer.status == 200
    assert "local" in answer.body
    assert "Log out" not in answer.body
    assert ask("/board/login").location == "/board/"
    assert ask("/board/", authorization="Bearer x").status == 200


@pytest.mark.parametrize(
    "header", ["forwarded", "via", "x_forwarded_for", "x_forwarded_host", "x_real_ip"]
)
def test_without_keys_nobody_comes_through_a_proxy(ask: Asking, door: Keyed, header: str) -> None:
    answer = ask("/board/", **{header: "10.1.2.3"})
    assert (answer.status, "needs keys" in answer.body) == (403, True)
    assert door.ask("/board/login", **{header: "10.1.2.3"}).status == 200


def test_the_page_of_the_login_goes_on_where_one_wanted_to_go(door: Keyed) -> None:
    first = door.ask("/board/requests?q=a%26b&q=%C3%A9")
    page = door.ask(first.location)
    assert page.status == 200
    assert "/board/requests?q=a%26b&amp;q=%C3%A9" in page.body
    answer = door.log_in_with(door.secrets["viewer"], back="/board/requests?q=a%26b&q=%C3%A9")
    assert answer.location == "/board/requests?q=a%26b&q=%C3%A9"


def test_who_comes_by_a_link_from_elsewhere_is_led_on(door: Keyed) -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    link |= {"sec_fetch_dest": "document"}
    first = door.ask("/board/audit", **link)
    page = door.ask(first.location, **link)
    assert 'href="/board/audit">go on</a>' in page.body


def test_names_of_servers_are_not_for_everybody(keys: Keys) -> None:
    with opened("redis://127.0.0.1:1", keys.yard, needs_keys=True) as ask:
        answer = ask("/board/", authorization="Bearer x")
        assert answer.status == 503
        assert "127.0.0.1:1" not in answer.body
    with opened("redis://127.0.0.1:1", keys.yard) as ask:
        answer = ask("/board/audit")
        assert (answer.status, "127.0.0.1:1" in answer.body) == (503, True)
