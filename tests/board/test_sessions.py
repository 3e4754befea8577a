"""Sessions: who holds one, and when it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.board.asking import STREAM
from tests.board.keyed import Keyed, keyed
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.board import access
from tokenyard.board.page import Actor
from tokenyard.ops.keys import revoke_key
from tokenyard.protocol.api_keys import key_digest
from tokenyard.protocol.keys import Yard

pytestmark = pytest.mark.usefixtures("quick_refusals")


def test_a_session_is_kept_as_digests_only(door: Keyed) -> None:
    cookie = door.log_in("operator")
    secret = cookie.partition("=")[2]
    names = [name.decode() for name in door.yard.connection.keys(f"*{{{door.yard.keys.yard}}}*")]
    (session,) = (name for name in names if ":board_session:" in name)
    kept = door.yard.connection.get(session)
    assert secret not in session
    assert json.loads(kept or "") == {"key": key_digest(door.secrets["operator"])}
    assert 0 < door.yard.connection.ttl(session) <= 12 * 3600


def test_a_cookie_is_for_the_board_only_and_not_for_scripts(door: Keyed) -> None:
    (cookie,) = door.log_in_with(door.secrets["viewer"]).cookies
    name, _, rest = cookie.partition("=")
    assert name.startswith("tokenyard_board_")
    parts = {part.strip().lower() for part in rest.split(";")[1:]}
    assert parts == {"httponly", "samesite=strict", "path=/board", "max-age=43200"}


@pytest.mark.parametrize("how", ["own", "proxy's"])
def test_with_tls_a_cookie_is_sent_by_tls_only_and_no_other_host_can_plant_it(
    how: str, broker: Server, bare: Yard
) -> None:
    more: dict[str, Any] = {
        "own": {"has_tls": True},
        "proxy's": {"hosts": ("https://board.example",)},
    }[how]
    with keyed(broker.url, bare, **more) as door:
        door.ask.host = "board.example" if how == "proxy's" else door.ask.host
        login = {"key": door.secrets["viewer"]}
        origin = f"https://{door.ask.host}"
        answer = door.ask("/board/login", "POST", form=login, origin=origin)
        (cookie,) = answer.cookies
        parts = {part.strip().lower() for part in cookie.split(";")[1:]}
        assert cookie.startswith("__Host-tokenyard_board_")
        assert {"httponly", "samesite=strict", "path=/", "secure"} <= parts
        assert not any(part.startswith("domain") for part in parts)
        assert door.ask("/board/", cookie=answer.cookie).status == 200
        # What was planted without the prefix does not count.
        assert door.ask("/board/", cookie=answer.cookie.removeprefix("__Host-")).status == 303
        # A page that came without TLS cannot act.
        plain = f"http://{door.ask.host}"
        assert door.ask("/board/login", "POST", form=login, origin=plain).status == 403


def test_a_session_that_was_prepared_is_not_taken_over(door: Keyed) -> None:
    prepared = door.log_in("viewer")
    answer = door.log_in_with(door.secrets["admin"], cookie=prepared)
    assert answer.cookie != prepared
    access_of = door.ask("/board/", cookie=answer.cookie)
    assert "of admin" in access_of.body


def test_a_login_ends_the_session_before(door: Keyed) -> None:
    before = door.log_in("viewer")
    assert door.ask("/board/", cookie=before).status == 200
    after = door.log_in("viewer", cookie=before)
    assert door.ask("/board/", cookie=before).status == 303
    assert door.ask("/board/", cookie=after).status == 200
    assert len(door.yard.connection.keys(f"*{{{door.yard.keys.yard}}}:board_session:*")) == 1


@pytest.mark.parametrize(
    "forged", ["", "x", "x" * 43, "*" * 43, "é" * 43, "../" * 20, "x" * 100_000]
)
def test_a_forged_cookie_opens_nothing(door: Keyed, forged: str) -> None:
    name = door.log_in("viewer").partition("=")[0]
    assert door.ask("/board/", cookie=f"{name}={forged}").status == 303


def test_of_two_cookies_none_counts(door: Keyed) -> None:
    cookie = door.log_in("viewer")
    assert door.ask("/board/", cookie=f"other=1; {cookie}").status == 200
    assert door.ask("/board/", cookie=f"{cookie}; {cookie}").status == 303
    name = cookie.partition("=")[0]
    assert door.ask("/board/", cookie=f"{name}=planted; {cookie}").status == 303


def test_a_session_ends_with_its_time(monkeypatch: pytest.MonkeyPatch, door: Keyed) -> None:
    monkeypatch.setattr(access, "TRUSTED_S", -1.0)
    cookie = door.log_in("viewer")
    assert door.ask("/board/", cookie=cookie).status == 200
    (session,) = door.yard.connection.keys(f"*{{{door.yard.keys.yard}}}:board_session:*")
    door.yard.connection.pexpire(session, 1)
    while door.yard.connection.exists(session):
        pass
    assert door.ask("/board/", cookie=cookie).status == 303


def test_a_logout_ends_the_session(door: Keyed) -> None:
    cookie = door.log_in("viewer")
    assert door.ask("/board/logout", cookie=cookie).status == 404  # a link cannot do it
    answer = door.ask("/board/logout", "POST", cookie=cookie)
    assert (answer.status, answer.location) == (303, "/board/login")
    assert "Max-Age=0" in answer.cookies[0]
    assert door.ask("/board/", cookie=cookie).status == 303
    assert not door.yard.connection.keys(f"*{{{door.yard.keys.yard}}}:board_session:*")


def test_a_revoked_key_ends_its_sessions(monkeypatch: pytest.MonkeyPatch, door: Keyed) -> None:
    monkeypatch.setattr(access, "TRUSTED_S", -1.0)
    cookie = door.log_in("operator")
    bearer = f"Bearer {door.secrets['operator']}"
    assert door.ask("/board/", cookie=cookie).status == 200
    assert door.ask("/board/", authorization=bearer).status == 200
    assert revoke_key(door.yard, door.ids["operator"])
    assert door.ask("/board/", cookie=cookie).status == 303
    assert door.ask("/board/", authorization=bearer).status == 401


@pytest.mark.long
def test_a_revoked_key_ends_its_open_pages(monkeypatch: pytest.MonkeyPatch, door: Keyed) -> None:
    # Given an open page whose session is looked up at each turn
    monkeypatch.setattr(access, "TRUSTED_S", -1.0)
    look_up, looked = access._look_up, []

    def noting(yard: Yard, kind: str, digest: str) -> Actor | None:
        looked.append(kind)
        return look_up(yard, kind, digest)

    cookie = door.log_in("viewer").encode()
    monkeypatch.setattr(access, "_look_up", noting)
    headers = [(b"host", door.ask.host.encode()), (b"accept", STREAM.encode()), (b"cookie", cookie)]

    async def look() -> float:
        looking = asyncio.create_task(door.ask.ask("GET", "/board/audit", headers))
        # when it is opened, at its first turn, at its second
        await asyncio.to_thread(eventually, lambda: looked.count("session") >= 3)
        assert not looking.done()
        began = asyncio.get_running_loop().time()
        revoke_key(door.yard, door.ids["viewer"])
        answer = await looking
        assert "still here" in answer.body
        return asyncio.get_running_loop().time() - began

    # If its key is revoked, I expect it to end long before it would by itself.
    assert asyncio.run(look()) < 30.0
