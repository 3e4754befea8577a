"""Cancel and requeue: one request, selected ones, all that match."""

from __future__ import annotations

from typing import Any

import pytest

from tests.board.calls import Calls
from tests.board.looking import Looker, text_of, values_of
from tests.board.request_rig import fail, ids, state_of
from tests.integration.test_listing import one_of_each_state
from tests.support.builders import make_request, make_result
from tests.support.letters import bury_many
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.ops import requests as actions
from tokenyard.ops.names import request_name
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import request_fields
from tokenyard.scripts.answers import Publication

pytestmark = [pytest.mark.valkey_only, pytest.mark.usefixtures("wide_search")]


def server_ms(yard: PlayedYard) -> int:
    seconds, micros = yard.connection.time()
    return int(seconds) * 1000 + int(micros) // 1000


def test_one_is_cancelled(looker: Looker, yard: PlayedYard) -> None:
    request = make_request("q", client="ann")
    yard.submit(request)
    asked = text_of(looker.ask("request.cancel", {"request": request_name("ann", "q")}))
    assert "Cancel 1 request (1 waiting)?" in asked
    assert state_of(yard, "ann", "q") == "waiting"
    entry = looker.do("request.cancel", {"request": "ann/q", "why": "a mistake"})
    assert (entry.who, entry.action, entry.target) == ("olga", "request.cancel", "ann/q")
    assert entry.text == "1 request cancelled."
    result = yard.result(request)
    assert result
    assert "cancelled by an operator: a mistake" in str(result.error)


def test_a_long_reason_is_cut_in_the_result_too(looker: Looker, yard: PlayedYard) -> None:
    request = make_request("q", client="ann")
    yard.submit(request)
    looker.do("request.cancel", {"request": "ann/q", "why": "x" * 9_000})
    result = yard.result(request)
    assert result
    assert f"cancelled by an operator: {'x' * 200}" in str(result.error)
    assert "x" * 201 not in str(result.error)


def test_selected_ones_are_cancelled_and_those_that_had_ended_are_told(
    looker: Looker, yard: PlayedYard
) -> None:
    one_of_each_state(yard)
    chosen = {"request": ["ann/assigned", "bob/waiting", "bob/failed", "ann/assigned"]}
    asked = text_of(looker.ask("request.cancel", chosen))
    assert "Cancel 2 requests (1 assigned and 1 waiting)?" in asked
    assert "1 request had ended already." in asked
    entry = looker.do("request.cancel", chosen)
    assert entry.text == "2 requests cancelled. 1 request had ended already."
    assert entry.target == "ann/assigned, bob/waiting, bob/failed"
    assert state_of(yard, "ann", "assigned") == state_of(yard, "bob", "waiting") == "cancelled"
    assert state_of(yard, "bob", "failed") == "failed"


def test_a_plain_request_without_a_ledger_is_cancelled(looker: Looker, yard: PlayedYard) -> None:
    fields: Any = request_fields(make_request("q", client="ann"))
    waiting = yard.push(fields)
    assert ids(looker.get("/requests")) == ["q"]
    looker.do("request.cancel", {"request": "ann/q"})
    assert state_of(yard, "ann", "q") == "cancelled"
    assert waiting.entry  # the coordinator drops it, as its id has ended


def test_all_that_match_are_cancelled_but_not_what_came_later(
    looker: Looker, yard: PlayedYard
) -> None:
    for number in range(30):
        yard.submit(make_request(f"q{number}", client="ann"))
        yard.submit(make_request(f"q{number}", client="bob"))
    page = looker.get("/requests?client=ann")
    fields = {"all": "on", "client": "ann", "until": values_of(page, "until")[0]}
    eventually(lambda: server_ms(yard) > int(fields["until"]))
    yard.submit(make_request("late", client="ann"))
    yard.assign(yard.worker(), make_request("running", client="ann"))

    asked = text_of(looker.ask("request.cancel", fields))
    assert "Cancel 30 requests (30 waiting)?" in asked
    assert "and 20 more" in asked
    assert "ann/q0, waiting" in asked
    entry = looker.do("request.cancel", fields)
    assert (entry.text, entry.target) == ("30 requests cancelled.", "requests, client ann")
    assert yard.connection.xlen(yard.keys.intake("normal")) == 31
    assert looker.ask("request.cancel", fields).count("There is nothing to cancel") == 1


def test_all_that_match_are_bounded_and_say_so(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MOST", 20)
    for number in range(30):
        yard.submit(make_request(f"q{number}"))
    asked = text_of(looker.ask("request.cancel", {"all": "on"}))
    assert "Cancel 20 requests" in asked
    assert "More than 20 match: these are the first; do it again for the rest." in asked
    assert "do it again" in looker.do("request.cancel", {"all": "on"}).text
    assert looker.do("request.cancel", {"all": "on"}).text == "10 requests cancelled."


def test_nothing_selected_is_refused(looker: Looker) -> None:
    answer = looker.post("request.cancel", {"why": "a slip"})
    assert answer.status_code == 400
    assert "no request is named" in answer.text
    assert looker.audit() == []


def test_what_has_ended_is_not_cancelled(looker: Looker, yard: PlayedYard) -> None:
    one_of_each_state(yard)
    assert "There is nothing to cancel" in looker.ask("request.cancel", {"request": "bob/failed"})
    assert looker.post("request.cancel", {"request": "bob/failed"}).status_code == 400
    assert state_of(yard, "bob", "failed") == "failed"


def test_failed_ones_are_requeued_from_their_letters(looker: Looker, yard: PlayedYard) -> None:
    request = make_request("q", client="ann")
    fail(yard, request)
    one_of_each_state(yard)
    names = ["ann/q", "bob/failed", "ann/completed", "bob/waiting", "ann/assigned", "bob/expired"]
    chosen = {"request": [*names, "ann/cancelled", "ann/unknown"]}
    asked = text_of(looker.ask("request.requeue", chosen))
    assert "Submit 1 failed request again?" in asked
    for problem in (
        "has completed.",
        "waits already.",
        "runs already.",
        "failed without a dead letter",
        "has expired",
        "was cancelled",
        "is not known here",
    ):
        assert f"1: {problem}" in asked
    entry = looker.do("request.requeue", chosen)
    assert entry.text.startswith("1 request waits again.")
    assert state_of(yard, "ann", "q") == "waiting"
    assert yard.connection.xlen(yard.keys.dead) == 0
    again = "There is nothing to requeue. 1: waits already."
    assert again in text_of(looker.ask("request.requeue", {"request": "ann/q"}))
    assert looker.post("request.requeue", {"request": "ann/q"}).status_code == 400


def test_what_has_completed_since_is_not_requeued(looker: Looker, yard: PlayedYard) -> None:
    # Given two letters, and the request of the later one submitted again and completed,
    fail(yard, make_request("first", client="ann"))
    again = make_request("again", client="ann")
    fail(yard, again)
    yard.connection.delete(yard.keys.ledger("ann", "again"))
    worker = yard.worker()
    assignment = yard.assign(worker, again)
    yard.scripts.finish(worker, [Publication(assignment, make_result("again", [1]))])
    # If both are selected, I expect only the other to run again.
    chosen = {"request": ["ann/first", "ann/again"]}
    assert looker.do("request.requeue", chosen).text.startswith("1 request waits again.")
    assert state_of(yard, "ann", "first") == "waiting"
    assert state_of(yard, "ann", "again") == "completed"


def test_letters_between_those_of_selected_requests_are_not_read(
    looker: Looker, yard: PlayedYard
) -> None:
    def let_time_pass() -> None:
        begin = server_ms(yard)
        eventually(lambda: server_ms(yard) > begin + 200)

    fail(yard, make_request("first", client="ann"))
    let_time_pass()
    bury_many(yard, 2_000)
    let_time_pass()
    fail(yard, make_request("last", client="ann"))
    calls = Calls(yard.connection)
    asked = looker.ask("request.requeue", {"request": ["ann/first", "ann/last"]})
    assert "Submit 2 failed requests again?" in text_of(asked)
    assert calls.made()["xrange"] <= 4


def test_a_search_of_letters_that_takes_too_long_says_so(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury_many(yard, 1_000)
    monkeypatch.setattr(actions, "_SEARCH_S", -1.0)
    fields = {"all": "on", "state": "failed"}
    asked = text_of(looker.ask("request.requeue", fields))
    assert "Submit 20 failed requests again?" in asked
    assert "not all dead letters were read" in asked


def test_no_more_can_be_selected_than_are_done_at_once(
    looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MOST", 2)
    chosen = {"request": ["ann/a", "ann/b", "ann/c"]}
    assert "more than 2 requests are selected" in looker.post("request.cancel", chosen).text


def test_all_failed_ones_that_match_are_requeued(looker: Looker, yard: PlayedYard) -> None:
    for number in range(12):
        fail(yard, make_request(f"q{number}", client="ann"), f"POISONED: fault {number % 2}")
    # Nobody could be answered about this one.
    yard.connection.xadd(
        yard.keys.dead, {"dead_reason": "POISONED: fault 1", "dead_sid": "low/1-0"}
    )
    fields = {"all": "on", "state": "failed", "error": "fault 1"}
    assert "Submit 6 failed requests again?" in text_of(looker.ask("request.requeue", fields))
    entry = looker.do("request.requeue", fields)
    assert entry.text == "6 requests wait again."
    assert entry.target == "requests, failed, error with 'fault 1'"
    waiting = yard.connection.xrange(yard.keys.intake("normal"))
    found = {getattr(parse_request(fields), "id", "") for _, fields in waiting}
    assert found == {f"q{number}" for number in range(1, 12, 2)}
    # A filter that asks for no failed ones requeues none.
    assert "nothing to requeue" in looker.ask("request.requeue", {"all": "on", "state": "waiting"})
