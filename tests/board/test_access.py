"""Who may do what: keys, sessions and roles, for each verb and each action."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.board.asking import Asking, opened
from tests.board.keyed import ROLES, Keyed, keyed
from tests.support.servers import Server
from tokenyard.admin.api_keys import create_key, revoke_key
from tokenyard.admin.audit import read_audit
from tokenyard.board import access, app
from tokenyard.board.action import Action, Outcome, Preview
from tokenyard.board.pages import ACTIONS, PAGES
from tokenyard.board.yard import RANK, Parameters, Yard
from tokenyard.protocol.api_keys import ApiKey, Role, encode_key, key_digest
from tokenyard.protocol.keys import Keys

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "NONE")
STREAM = "text/event-stream"
PLAIN_PAGES = [page for page in PAGES if "{" not in page.path]


@pytest.fixture(autouse=True)
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_REFUSED_AFTER_S", 0.01)


@pytest.fixture
def door(broker: Server, connection: redis.Redis, keys: Keys) -> Iterator[Keyed]:
    with keyed(broker.url, connection, keys) as made:
        yield made


class Deeds:
    """Stand in for all actions, and note what is called."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def of(self, action: Action) -> Action:
        def preview(yard: Yard, given: Parameters) -> Preview:
            return Preview("It would be done.")

        def run(yard: Yard, given: Parameters) -> Outcome:
            self.done.append(action.name)
            return Outcome("It is done.", "everything")

        return dataclasses.replace(action, preview=preview, run=run)


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch) -> Deeds:
    noting = Deeds()
    stand_ins = {name: noting.of(action) for name, action in ACTIONS.items()}
    monkeypatch.setattr(app, "ACTIONS", stand_ins)
    return noting


# Roles


def test_each_verb_of_each_role_at_each_action(
    deeds: Deeds, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    assert len(ACTIONS) > 5
    with keyed(broker.url, connection, keys) as door:
        cookies = {role: door.log_in(role) for role in ROLES}
        for name, action in ACTIONS.items():
            for role in (None, *ROLES):
                may = role is not None and RANK[role] >= RANK[action.role]
                for verb in VERBS:
                    deeds.done.clear()
                    form = {"why": "a test"} if verb == "POST" else None
                    cookie = cookies[role] if role else None
                    answer = door.ask(f"/board/do/{name}", verb, form=form, cookie=cookie)
                    seen = (name, role, verb, answer.status)
                    if verb not in {"GET", "HEAD", "POST"}:
                        assert answer.status == 405, seen
                    elif role is None:
                        assert answer.status == (401 if verb == "POST" else 303), seen
                    elif not may:
                        assert answer.status == 403, seen
                    else:
                        assert answer.status == (303 if verb == "POST" else 200), seen
                    assert deeds.done == ([name] if may and verb == "POST" else []), seen
        by_role = {entry.role for entry in read_audit(connection, keys)}
        assert by_role <= set(ROLES)


@pytest.mark.parametrize("page", PLAIN_PAGES, ids=lambda page: page.path)
def test_no_page_is_shown_without_a_session(door: Keyed, page: Any) -> None:
    path = f"/board{page.path}"
    answer = door.ask(path)
    assert (answer.status, answer.body) == (303, "")
    assert answer.location.startswith("/board/login?back=%2Fboard%2F")
    assert door.ask(path, accept=STREAM).status == 401
    assert door.ask(path, "POST", form={}).status == 405
    for role in ROLES:
        status = door.ask(path, cookie=door.log_in(role)).status
        may = RANK[role] >= RANK[page.role]
        assert status in ({200, 400, 404} if may else {403}), role  # some ask for parameters


def test_a_path_that_does_not_exist_is_not_told_without_a_session(door: Keyed) -> None:
    assert door.ask("/board/nothing").status == 303
    assert door.ask("/board/nothing", cookie=door.log_in("viewer")).status == 404
    assert door.ask("/board/static/board.css").status == 200


def test_an_action_is_recorded_with_who_and_why(
    deeds: Deeds, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    name = next(iter(ACTIONS))
    with keyed(broker.url, connection, keys) as door:
        form = {"why": "  it was\n late  " + "x" * 500, "back": "/board/audit?q=1"}
        cookie = door.log_in("admin")
        answer = door.ask(f"/board/do/{name}", "POST", form=form, cookie=cookie)
        (entry,) = read_audit(connection, keys)
        assert entry.who == f"{door.ids['admin']} of admin"
        assert (entry.role, entry.action, entry.text) == ("admin", name, "It is done.")
        assert entry.why.startswith("it was\n late  xxx")
        assert len(entry.why) == 200
        assert answer.location == f"/board/audit?q=1&done={entry.entry}"
        told = "It is done."
        assert told in door.ask(f"/board/?done={entry.entry}", cookie=cookie).body
        # Nobody is told of what another one has done, or of what there was not.
        viewer = door.log_in("viewer")
        assert told not in door.ask(f"/board/?done={entry.entry}", cookie=viewer).body
        for other in ("0-0", "1-1", "99999999999999999999-0", "x", "%00", entry.entry + "1"):
            answer = door.ask(f"/board/?done={other}", cookie=cookie)
            assert (answer.status, told in answer.body) == (200, False), other


def test_an_action_is_told_for_a_time(
    monkeypatch: pytest.MonkeyPatch, deeds: Deeds, ask: Asking
) -> None:
    page = ask(f"/board/do/{next(iter(ACTIONS))}", "POST", form={}).location
    assert "It is done." in ask(page).body
    monkeypatch.setattr(app, "_TOLD_MS", -1)
    assert "It is done." not in ask(page).body


def test_an_action_that_cannot_be_recorded_says_so(
    deeds: Deeds, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    connection.set(keys.audit, "no stream")
    with opened(broker.url, keys.yard) as ask:
        answer = ask(f"/board/do/{next(iter(ACTIONS))}", "POST", form={})
    assert answer.status == 200
    assert "It is done. But the audit could not be written" in answer.body
    assert len(deeds.done) == 1


def test_what_breaks_in_the_middle_is_recorded(
    monkeypatch: pytest.MonkeyPatch, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    def run(yard: Yard, given: Parameters) -> Outcome:
        raise ValueError("a mistake of <ours>")

    name, action = next(iter(ACTIONS.items()))
    monkeypatch.setattr(app, "ACTIONS", {name: dataclasses.replace(action, run=run)})
    with opened(broker.url, keys.yard) as ask:
        answer = ask(f"/board/do/{name}", "POST", form={})
    assert answer.status == 500
    assert "mistake" not in answer.body
    assert [entry.error for entry in read_audit(connection, keys)] == ["a mistake of <ours>"]


# Sessions


def test_a_session_is_kept_as_digests_only(
    door: Keyed, connection: redis.Redis, keys: Keys
) -> None:
    cookie = door.log_in("operator")
    secret = cookie.partition("=")[2]
    names = [name.decode() for name in connection.keys(f"*{{{keys.yard}}}*")]
    (session,) = (name for name in names if ":board_session:" in name)
    kept = connection.get(session)
    assert secret not in session
    assert json.loads(kept or "") == {"key": key_digest(door.secrets["operator"])}
    assert 0 < connection.ttl(session) <= 12 * 3600


def test_a_cookie_is_for_the_board_only_and_not_for_scripts(door: Keyed) -> None:
    (cookie,) = door.log_in_with(door.secrets["viewer"]).cookies
    name, _, rest = cookie.partition("=")
    assert name.startswith("tokenyard_board_")
    parts = {part.strip().lower() for part in rest.split(";")[1:]}
    assert parts == {"httponly", "samesite=strict", "path=/board", "max-age=43200"}


@pytest.mark.parametrize("how", ["own", "proxy's"])
def test_with_tls_a_cookie_is_sent_by_tls_only_and_no_other_host_can_plant_it(
    how: str, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    more: dict[str, Any] = {
        "own": {"has_tls": True},
        "proxy's": {"hosts": ("https://board.example",)},
    }[how]
    with keyed(broker.url, connection, keys, **more) as door:
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


def test_a_login_ends_the_session_before(door: Keyed, connection: redis.Redis, keys: Keys) -> None:
    before = door.log_in("viewer")
    assert door.ask("/board/", cookie=before).status == 200
    after = door.log_in("viewer", cookie=before)
    assert door.ask("/board/", cookie=before).status == 303
    assert door.ask("/board/", cookie=after).status == 200
    assert len(connection.keys(f"*{{{keys.yard}}}:board_session:*")) == 1


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


def test_a_session_ends_with_its_time(
    monkeypatch: pytest.MonkeyPatch, door: Keyed, connection: redis.Redis, keys: Keys
) -> None:
    monkeypatch.setattr(access, "TRUSTED_S", -1.0)
    cookie = door.log_in("viewer")
    assert door.ask("/board/", cookie=cookie).status == 200
    (session,) = connection.keys(f"*{{{keys.yard}}}:board_session:*")
    connection.pexpire(session, 1)
    while connection.exists(session):
        pass
    assert door.ask("/board/", cookie=cookie).status == 303


def test_a_logout_ends_the_session(door: Keyed, connection: redis.Redis, keys: Keys) -> None:
    cookie = door.log_in("viewer")
    assert door.ask("/board/logout", cookie=cookie).status == 404  # a link cannot do it
    answer = door.ask("/board/logout", "POST", cookie=cookie)
    assert (answer.status, answer.location) == (303, "/board/login")
    assert "Max-Age=0" in answer.cookies[0]
    assert door.ask("/board/", cookie=cookie).status == 303
    assert not connection.keys(f"*{{{keys.yard}}}:board_session:*")


def test_a_revoked_key_ends_its_sessions(
    monkeypatch: pytest.MonkeyPatch, door: Keyed, connection: redis.Redis, keys: Keys
) -> None:
    monkeypatch.setattr(access, "TRUSTED_S", -1.0)
    cookie = door.log_in("operator")
    bearer = f"Bearer {door.secrets['operator']}"
    assert door.ask("/board/", cookie=cookie).status == 200
    assert door.ask("/board/", authorization=bearer).status == 200
    assert revoke_key(connection, keys, door.ids["operator"])
    assert door.ask("/board/", cookie=cookie).status == 303
    assert door.ask("/board/", authorization=bearer).status == 401


def test_a_bounded_number_of_lookups_is_kept(monkeypatch: pytest.MonkeyPatch, door: Keyed) -> None:
    monkeypatch.setattr(access, "_MOST_KNOWN", 3)
    for number in range(10):
        assert door.ask("/board/", authorization=f"Bearer guess-{number}").status == 401
    assert len(door.ask.board._door._known) <= 3


def test_a_lookup_is_used_again_for_two_seconds_at_most() -> None:
    assert access.TRUSTED_S <= 2.0


def test_a_revoked_key_ends_its_open_pages(
    monkeypatch: pytest.MonkeyPatch, door: Keyed, connection: redis.Redis, keys: Keys
) -> None:
    monkeypatch.setattr(access, "TRUSTED_S", -1.0)
    cookie = door.log_in("viewer").encode()
    headers = [(b"host", door.ask.host.encode()), (b"accept", STREAM.encode()), (b"cookie", cookie)]

    async def look() -> float:
        looking = asyncio.create_task(door.ask.ask("GET", "/board/audit", headers))
        await asyncio.sleep(0.5)
        assert not looking.done()
        began = asyncio.get_running_loop().time()
        revoke_key(connection, keys, door.ids["viewer"])
        answer = await looking
        assert "still here" in answer.body
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(look()) < 5.0


# Keys


def test_only_a_key_with_a_role_opens_the_board(
    door: Keyed, connection: redis.Redis, keys: Keys
) -> None:
    tenants, _ = create_key(connection, keys, "research")
    both, _ = create_key(connection, keys, "research", role="viewer")
    broken = "ty-broken"
    connection.hset(keys.api_keys, key_digest(broken), b"\xff{")
    strange = "ty-strange"
    connection.hset(keys.api_keys, key_digest(strange), b'{"role":"owner","tenant":"a"}')
    nothing = "ty-nothing"
    connection.hset(keys.api_keys, key_digest(nothing), encode_key(ApiKey()))
    assert door.log_in_with(both).status == 303
    digest = key_digest(door.secrets["admin"])
    hostile = ["", " ", "*", "ty-", digest, digest[:12], "x" * 513, "x" * 10_000, "é\x00\n"]
    for key in (tenants, broken, strange, nothing, *hostile):
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
    name = next(name for name, action in ACTIONS.items() if action.role != "viewer")
    for authorization in (bearer, "Bearer wrong", ""):
        answer = door.ask(
            f"/board/do/{name}",
            "POST",
            form={},
            origin=None,
            authorization=authorization,
            cookie=cookie,
        )
        assert answer.status in {401, 403}


def test_a_program_needs_no_origin(
    deeds: Deeds, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    name = next(iter(ACTIONS))
    with keyed(broker.url, connection, keys) as door:
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


@pytest.mark.parametrize("rule", ["nobody", "admin", "operator", "viewer"])
def test_who_sees_prompts_and_answers(
    rule: Any,
    monkeypatch: pytest.MonkeyPatch,
    broker: Server,
    connection: redis.Redis,
    keys: Keys,
) -> None:
    seen: dict[Role | str, bool] = {}

    def view(yard: Yard, given: Parameters) -> dict[str, Any]:
        seen[given.actor.role] = given.actor.shows_content
        return {"entries": [], "is_newest": True, "before": "", "most": 1}

    page = next(page for page in PAGES if page.path == "/audit")
    monkeypatch.setattr(app, "PAGES", [dataclasses.replace(page, view=view)])
    with keyed(broker.url, connection, keys, shows_content_to=rule) as door:
        for role in ROLES:
            assert door.ask("/board/audit", cookie=door.log_in(role)).status == 200
    expected = {role: rule != "nobody" and RANK[role] >= RANK[rule] for role in ROLES}
    assert seen == expected


# Without keys


def test_without_keys_everybody_on_loopback_is_an_admin(broker: Server, keys: Keys) -> None:
    with opened(broker.url, keys.yard) as ask:
        answer = ask("/board/")
        assert answer.status == 200
        assert "local" in answer.body
        assert "Log out" not in answer.body
        assert ask("/board/login").location == "/board/"
        assert ask("/board/", authorization="Bearer x").status == 200


@pytest.mark.parametrize(
    "header", ["forwarded", "via", "x_forwarded_for", "x_forwarded_host", "x_real_ip"]
)
def test_without_keys_nobody_comes_through_a_proxy(
    header: str, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    with opened(broker.url, keys.yard) as ask:
        answer = ask("/board/", **{header: "10.1.2.3"})
        assert (answer.status, "needs keys" in answer.body) == (403, True)
    with keyed(broker.url, connection, keys) as door:
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
