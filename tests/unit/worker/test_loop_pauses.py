"""The engine loop while operators have paused it."""

from __future__ import annotations

import time

import pytest

from tests.support.builders import make_request
from tests.support.office import Office, finished
from tests.support.waiting import eventually
from tokenyard.protocol.control import PauseMode
from worker.engines import TokenDelta
from worker.messages import (
    Done,
    Drain,
    Drained,
    LaneReleased,
    Paused,
    PauseEngine,
    Serve,
    SetEpoch,
    UnpauseEngine,
)
from worker.process.loop import Stale
from worker.process.outcomes import Expired


@pytest.fixture
def office() -> Office:
    """With one request that runs."""
    made = Office()
    made.deliver("1-0")
    made.engine.steps = [[TokenDelta("1-0", 0, [5])]]
    made.turn()
    return made


def say(
    office: Office, *messages: PauseEngine | UnpauseEngine | SetEpoch | Drain | Serve | Stale
) -> None:
    for message in messages:
        office.loop.inbox.put(message)
    office.turn()


class TestKeep:
    def test_the_engine_stands_still(self, office: Office) -> None:
        say(office, PauseEngine("keep"))
        steps = office.loop.steps
        office.deliver("2-0")
        office.turn()

        assert office.told == [Paused("keep")]
        assert office.loop.steps == steps
        assert office.engine.has == ["1-0"], "nothing new is begun"
        assert office.loop.unfinished == 0, "nobody may think that it hangs"
        assert list(office.terms[0].runs) == ["1-0", "2-0"]

        say(office, UnpauseEngine())
        assert office.told[-1] == Done(UnpauseEngine())
        assert office.engine.has == ["1-0", "2-0"]
        assert office.loop.steps == steps + 1
        assert office.loop.unfinished == 2

    def test_what_waits_may_be_cancelled(self, office: Office) -> None:
        say(office, PauseEngine("keep"))
        office.deliver("2-0")
        office.turn()

        say(office, Stale("w.1", "2-0"))
        say(office, UnpauseEngine())

        assert office.engine.has == ["1-0"]

    def test_a_drain_waits_for_nothing_that_may_not_run(self, office: Office) -> None:
        say(office, PauseEngine("keep"), Drain())

        assert office.told == [Paused("keep"), Drained()]

    def test_what_has_not_begun_begins_in_the_epoch_in_which_it_does(self, office: Office) -> None:
        say(office, PauseEngine("keep"))
        office.deliver("2-0")
        office.turn()
        say(office, SetEpoch(4), UnpauseEngine())

        assert [run.epoch for run in office.terms[0].runs.values()] == [None, 4]


class TestWait:
    def test_what_has_begun_is_finished(self, office: Office) -> None:
        office.engine.steps = [[TokenDelta("1-0", 0, [6])], [finished("1-0", [5, 6, 7])]]
        say(office, PauseEngine("wait"))
        assert office.told == []

        office.turn()
        office.turn()

        assert office.terms[0].given[-1] == finished("1-0", [5, 6, 7])
        assert office.told == [Paused("wait")]
        assert office.terms[0].running, "it keeps its lane"

    def test_what_comes_meanwhile_is_given_up_at_the_end(self, office: Office) -> None:
        office.engine.steps = [[], [finished("1-0", [5])]]
        say(office, PauseEngine("wait"))
        office.deliver("2-0")
        office.turn()
        office.turn()

        assert office.told == [Paused("wait"), LaneReleased("w.1")]
        assert not office.terms[0].running

    def test_or_begun_when_it_is_taken_back(self, office: Office) -> None:
        say(office, PauseEngine("wait"))
        office.deliver("2-0")
        office.turn()
        say(office, UnpauseEngine())

        assert office.told == [Done(UnpauseEngine())]
        assert office.engine.has == ["1-0", "2-0"]


class TestAbort:
    def test_what_runs_is_given_up(self, office: Office) -> None:
        say(office, PauseEngine("abort"))

        assert office.told == [LaneReleased("w.1"), Paused("abort")]
        assert office.engine.aborted == ["1-0"]
        assert not office.terms[0].running

    def test_who_has_nothing_keeps_its_lane(self) -> None:
        office = Office()
        say(office, PauseEngine("abort"))

        assert office.told == [Paused("abort")]
        assert office.terms[0].running

    @pytest.mark.parametrize("mode", ["abort", "wait"])
    def test_what_slips_through_is_given_up(self, mode: PauseMode) -> None:
        office = Office()
        say(office, PauseEngine(mode))
        office.turn()
        office.deliver("2-0")
        office.deliver("3-0")
        office.turn()

        assert office.told == [Paused(mode), LaneReleased("w.1")]
        assert office.engine.has == []

        # Under another name it is as paused as before, and goes on when it may.
        say(office, Serve("w.2"))
        office.deliver("2-0", "w.2")
        office.turn()
        assert office.told[-1] == LaneReleased("w.2")
        say(office, Serve("w.3"), UnpauseEngine())
        office.deliver("4-0", "w.3")
        office.turn()
        assert office.engine.has == ["4-0"]

    def test_what_was_kept_may_be_given_up_later(self, office: Office) -> None:
        say(office, PauseEngine("keep"))
        say(office, PauseEngine("abort"))

        assert office.told == [Paused("keep"), LaneReleased("w.1"), Paused("abort")]


def test_each_term_knows_the_epoch(office: Office) -> None:
    say(office, SetEpoch(3))
    say(office, Serve("w.2"))

    assert office.told == [Done(SetEpoch(3))]
    assert [term.epoch for term in office.terms] == [3, 3]


def test_deadlines_act_all_the_same(office: Office) -> None:
    # Given a kept request and one that waits behind it, both too late by now
    late_ms = int(time.time() * 1000) + 50
    office.deliver("2-0", request=make_request(deadline_ms=late_ms))
    office.turn()
    say(office, PauseEngine("keep"))
    office.deliver("3-0", request=make_request(deadline_ms=late_ms))
    office.turn()

    eventually(lambda: (office.turn(), len(office.terms[0].given) == 3)[1])

    given = office.terms[0].given
    assert {one.key for one in given if isinstance(one, Expired)} == {"2-0", "3-0"}
    say(office, UnpauseEngine())
    assert office.engine.has == ["1-0"]
