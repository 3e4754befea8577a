"""Roles: who may see which page, and who may do what."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.board.asking import STREAM, Asking
from tests.board.deeds import Deeds
from tests.board.keyed import ROLES, Keyed, keyed
from tests.support.servers import Server
from tokenyard.board import app
from tokenyard.board.operations import OPERATIONS
from tokenyard.board.page import RANK, Parameters
from tokenyard.board.pages import PAGES
from tokenyard.ops.audit import read_audit
from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.keys import Yard

pytestmark = pytest.mark.usefixtures("quick_refusals")
VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "NONE")
PLAIN_PAGES = [page for page in PAGES if "{" not in page.path]


def test_each_verb_of_each_role_at_each_action(deeds: Deeds, door: Keyed) -> None:
    assert len(OPERATIONS) > 5
    cookies = {role: door.log_in(role) for role in ROLES}
    for name, action in OPERATIONS.items():
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
    by_role = {entry.role for entry in read_audit(door.yard)}
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


def test_an_action_is_recorded_with_who_and_why(deeds: Deeds, door: Keyed) -> None:
    name = next(iter(OPERATIONS))
    form = {"why": "  it was\n late  " + "x" * 500, "back": "/board/audit?q=1"}
    cookie = door.log_in("admin")
    answer = door.ask(f"/board/do/{name}", "POST", form=form, cookie=cookie)
    (entry,) = read_audit(door.yard)
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
    page = ask(f"/board/do/{next(iter(OPERATIONS))}", "POST", form={}).location
    assert "It is done." in ask(page).body
    monkeypatch.setattr(app, "_TOLD_MS", -1)
    assert "It is done." not in ask(page).body


def test_an_action_that_cannot_be_recorded_says_so(deeds: Deeds, bare: Yard, ask: Asking) -> None:
    bare.connection.set(bare.keys.audit, "no stream")
    answer = ask(f"/board/do/{next(iter(OPERATIONS))}", "POST", form={})
    assert answer.status == 200
    assert "It is done. But the audit could not be written" in answer.body
    assert len(deeds.done) == 1


@pytest.mark.parametrize("rule", ["nobody", "admin", "operator", "viewer"])
def test_who_sees_prompts_and_answers(
    rule: Any,
    monkeypatch: pytest.MonkeyPatch,
    broker: Server,
    bare: Yard,
) -> None:
    seen: dict[Role | str, bool] = {}

    def view(yard: Yard, given: Parameters) -> dict[str, Any]:
        seen[given.actor.role] = given.actor.shows_content
        return {"entries": [], "is_newest": True, "before": "", "most": 1}

    page = next(page for page in PAGES if page.path == "/audit")
    monkeypatch.setattr(app, "PAGES", [dataclasses.replace(page, view=view)])
    with keyed(broker.url, bare, shows_content_to=rule) as door:
        for role in ROLES:
            assert door.ask("/board/audit", cookie=door.log_in(role)).status == 200
    expected = {role: rule != "nobody" and RANK[role] >= RANK[rule] for role in ROLES}
    assert seen == expected
