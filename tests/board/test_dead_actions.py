"""What operators do with dead letters: requeue and drop them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.board.calls import Calls
from tests.board.looking import Looker
from tests.support.builders import make_request
from tests.support.fake_clock import FakeClock
from tests.support.letters import MANY, bury, bury_many, left
from tests.support.yard import PlayedYard

pytestmark = pytest.mark.valkey_only


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a count may take longer than an operator should wait."""
    monkeypatch.setattr("tokenyard.ops.letters._COUNT_S", 60.0)


def test_one_letter_is_requeued(looker: Looker, yard: PlayedYard) -> None:
    request = make_request("q", client="ann")
    letter, other = bury(yard, request), bury(yard)
    asked = looker.asked("dead.requeue", {"letter": letter})
    assert "Requeue 1 dead letter." in asked
    assert f"{letter} (ann/q)" in asked
    assert left(yard) == [letter, other]

    done = looker.do("dead.requeue", {"letter": letter, "why": "the bug is fixed"})

    assert (done.text, done.target) == ("1 dead letter requeued.", f"dead letter {letter}")
    assert (done.action, done.why) == ("dead.requeue", "the bug is fixed")
    assert left(yard) == [other]
    assert yard.ledger(request)["state"] == "waiting"
    assert len(yard.intake("low")) == 1


def test_selected_letters_are_dropped(looker: Looker, yard: PlayedYard) -> None:
    names = bury_many(yard, 300)
    chosen = names[50:250]
    asked = looker.asked("dead.drop", {"letter": chosen})
    assert "Drop 200 dead letters." in asked
    assert "and 180 more" in asked
    yard.connection.xdel(yard.keys.dead, *chosen[:5])
    done = looker.do("dead.drop", {"letter": chosen})
    assert done.text == "195 dead letters dropped. Not dropped: 5 (gone)."
    assert left(yard) == names[:50] + names[250:]


def test_what_cannot_run_again_is_told_with_the_reason(looker: Looker, yard: PlayedYard) -> None:
    waits = make_request("waits")
    letters = [bury(yard, waits), bury(yard)]
    yard.submit(waits)

    done = looker.do("dead.requeue", {"letter": letters})

    why = "Not requeued: 1 (its request waits already)."
    assert done.text == f"1 dead letter requeued. {why}"
    assert left(yard) == [done.details["not done"]] == letters[:1]


@pytest.mark.usefixtures("unhurried")
def test_all_that_match_are_requeued_but_not_later_ones(looker: Looker, yard: PlayedYard) -> None:
    bury_many(yard, 1_000)
    page = looker.get("/dead", parameters={"client": "ann"})
    [upto] = set(re.findall(r'name="upto" value="(\d+-\d+)"', page))
    later = bury(yard, make_request("later", client="ann"))
    fields = {"client": "ann", "upto": upto}

    asked = looker.asked("dead.requeue", fields)
    assert "Requeue 500 dead letters with client ann, up to the one of 20" in asked
    assert "and 480 more" in asked
    done = looker.do("dead.requeue", fields)

    assert done.text == "500 dead letters requeued."
    assert done.target == "dead letters with client ann"
    assert len(left(yard)) == 501
    assert left(yard)[-1] == later
    # None has died before this year.
    before = {"until": "2026-01-01T00:00", "upto": later}
    assert "No dead letter matches" in looker.asked("dead.requeue", before)
    assert len(yard.intake("low")) == 500


@pytest.mark.long
@pytest.mark.usefixtures("unhurried")
def test_ten_thousand_letters_are_dropped_in_bounded_pieces(
    looker: Looker, yard: PlayedYard
) -> None:
    names = bury_many(yard, MANY)
    later = bury(yard)
    fields = {"upto": names[-1]}
    assert "Drop 10,000 dead letters, up to" in looker.asked("dead.drop", fields)
    calls = Calls(yard.connection)
    done = looker.do("dead.drop", {**fields, "back": "/board/dead"})
    made = calls.made()
    assert done.text == "10,000 dead letters dropped."
    assert left(yard) == [later]
    assert made["xrange"] <= MANY // 200 + 20


def test_the_page_that_asks_counts_for_a_bounded_time(
    looker: Looker, yard: PlayedYard, fake_clock: FakeClock
) -> None:
    """Given reads that take 50 ms, I expect a few of them, and all to be dropped."""
    names = bury_many(yard, MANY)
    fields = {"upto": names[-1], "client": "bob"}
    fake_clock.ticks_s = 0.05
    calls = Calls(yard.connection)

    asked = looker.asked("dead.drop", fields)

    assert calls.made()["xrange"] <= 6
    assert re.search(r"Drop at least [1-9]\d\d? dead letters with client bob", asked)
    done = looker.do("dead.drop", fields)
    assert done.text == "5,000 dead letters dropped."


def test_an_action_that_takes_too_long_says_so(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenyard.ops.letters._ACT_S", -1.0)
    monkeypatch.setattr("tokenyard.ops.letters._COUNT_S", -1.0)
    names = bury_many(yard, 300)
    asked = looker.asked("dead.drop", {"upto": names[-1], "client": "bob"})
    assert "Drop at least 10 dead letters with client bob" in asked  # of the first twenty
    done = looker.do("dead.drop", {"upto": names[-1]})
    assert "It stopped after" in done.text
    assert left(yard) == names


@pytest.mark.parametrize(
    "fields", [{}, {"upto": "x"}, {"letter": "x"}, {"letter": [f"1-{n}" for n in range(501)]}]
)
def test_forms_without_sense_change_nothing(
    looker: Looker, yard: PlayedYard, fields: dict[str, Any]
) -> None:
    letter = bury(yard)
    looker.get("/do/dead.drop", parameters=fields, status=400)
    assert looker.post("dead.drop", fields).status_code == 400
    assert left(yard) == [letter]
