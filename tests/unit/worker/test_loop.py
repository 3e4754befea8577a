"""The engine loop: assignments in, steps, events out, until the model has to go."""

from __future__ import annotations

import time

import pytest

from tests.support.builders import make_assignment, make_request
from tests.support.fake_clock import FakeClock
from tests.support.loop_rig import LoopRig, finished
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts.answers import CancelledUse, Publication
from worker.engines import RequestError
from worker.messages import (
    AbortRequests,
    Asleep,
    Delivery,
    Done,
    Drain,
    Drained,
    Fenced,
    LeaseLost,
    LoadModel,
    PauseEngine,
    Ready,
    ReloadWeights,
    Serve,
    Sleep,
    Stop,
    Unload,
    Wake,
)
from worker.models import ModelSpec
from worker.process.loop import DRAINING_WAIT_S, IDLE_WAIT_S, LEAST_CLEARED, PROGRESS_EVERY_S
from worker.process.outcomes import Aborted, Expired, Remembered, Run


@pytest.fixture
def rig() -> LoopRig:
    return LoopRig()


def test_what_is_made_of_whole_answers_is_noted_once_a_second(
    rig: LoopRig, fake_clock: FakeClock
) -> None:
    rig.deliver("1-0")
    rig.engine.made = [5, 6]

    rig.turn()
    rig.turn()
    assert len(rig.sessions[0].made) == 1
    fake_clock.advance(PROGRESS_EVERY_S)
    rig.turn()

    assert rig.sessions[0].made == [{"1-0": 2}] * 2


def test_a_request_that_this_version_cannot_read_is_answered(rig: LoopRig) -> None:
    assignment = make_assignment(entry="1-0")
    unreadable = Assignment(
        request=assignment.request, entry="1-0", sid="normal/1-0", attempt=1, fault="params: x"
    )
    rig.say(Delivery("w.1", [unreadable]))

    (fault,) = rig.sessions[0].given
    assert isinstance(fault, RequestError)
    assert "params: x" in fault.message
    assert not rig.engine.has


def test_a_delivery_to_an_earlier_incarnation_is_dropped(rig: LoopRig) -> None:
    rig.bring("1-0", worker="w.0")

    assert not rig.engine.has
    assert rig.loop.unfinished == 0


def test_a_stale_request_leaves_the_engine(rig: LoopRig) -> None:
    rig.deliver("1-0")
    rig.deliver("2-0")
    rig.loop.inbox.put(AbortRequests("w.1", ["1-0"]))
    rig.loop.inbox.put(AbortRequests("w.0", ["2-0"]))  # about an entry of an earlier incarnation

    rig.turn()

    assert rig.engine.has == ["2-0"]
    assert rig.sessions[0].settled == []


class TestCharged:
    """A stale request that a tenant pays for: what was generated is reported."""

    def test_a_running_request_is_reported_with_its_tokens(self, rig: LoopRig) -> None:
        rig.engine.made = [5, 6]
        rig.deliver("1-0")
        rig.deliver("2-0")
        rig.say(AbortRequests("w.1", ["1-0"], "ann/q/1"))

        assert rig.engine.has == ["2-0"]
        assert rig.loop.unfinished == 1
        (told,) = rig.sessions[0].settled
        assert told == Aborted("1-0", "ann/q/1", finished("1-0", [5, 6]))
        assert told.used == CancelledUse("ann", "q/1", "1-0", 3, 0, 2)

    def test_a_request_that_never_came_is_reported_as_not_begun(self, rig: LoopRig) -> None:
        rig.loop.inbox.put(AbortRequests("w.1", ["1-0"], "ann/1"))
        rig.loop.inbox.put(AbortRequests("w.0", ["2-0"], "ann/2"))  # of an earlier incarnation

        rig.turn()

        (told,) = rig.sessions[0].settled
        assert told.used == CancelledUse("ann", "1", "1-0", None)

    def test_a_request_that_waits_for_the_end_of_a_pause_has_not_begun(self, rig: LoopRig) -> None:
        rig.loop.inbox.put(PauseEngine("keep"))
        rig.deliver("1-0")
        rig.say(AbortRequests("w.1", ["1-0"], "ann/1"))

        assert rig.sessions[0].settled == [Aborted("1-0", "ann/1", None)]
        assert rig.loop.unfinished == 0

    def test_a_request_whose_end_is_to_be_published_is_left_to_the_publisher(
        self, rig: LoopRig
    ) -> None:
        rig.bring("1-0")
        rig.engine.has.clear()  # it has ended, and the publisher has not got to it

        rig.say(AbortRequests("w.1", ["1-0"], "ann/1"))

        assert rig.sessions[0].settled == []
        assert rig.loop.unfinished == 1

    def test_an_engine_that_cannot_tell_leaves_the_estimate(self, rig: LoopRig) -> None:
        rig.engine.made = None
        rig.deliver("1-0")
        rig.say(AbortRequests("w.1", ["1-0"], "ann/1"))

        assert rig.sessions[0].settled == []
        assert rig.engine.has == []
        assert rig.loop.unfinished == 0


@pytest.mark.parametrize(("made", "where"), [([1, 2], "running"), ([], "on the worker's lane")])
def test_a_deadline_ends_a_request(
    fake_clock: FakeClock, rig: LoopRig, made: list[int], where: str
) -> None:
    # Given requests, two with deadlines, one of them sooner
    rig.engine.made = made
    soon, later = (int((fake_clock.wall() + hours * 3600) * 1000) for hours in (1, 3))
    for entry, deadline_ms in (("1-0", None), ("2-0", soon), ("3-0", later)):
        rig.deliver(entry, request=make_request(deadline_ms=deadline_ms))
    rig.turn()
    assert rig.engine.has == ["1-0", "2-0", "3-0"]

    # If that deadline passes
    fake_clock.advance(2 * 3600.0)
    rig.turn()

    # I expect only that request to end, with its tokens so far.
    expected = finished("2-0", made)
    assert rig.sessions[0].given == [Expired("2-0", expected, where)]
    assert rig.engine.has == ["1-0", "3-0"]


def test_deadlines_follow_the_servers_clock(fake_clock: FakeClock, rig: LoopRig) -> None:
    rig.sessions[0].broker_time.measured((7_000, 0), fake_clock.monotonic())
    fake_clock.step(3600.0)
    rig.deliver("1-0", request=make_request(deadline_ms=6_999_000))
    rig.deliver("2-0", request=make_request(deadline_ms=7_060_000))

    rig.turn()

    assert rig.engine.has == ["2-0"]


def test_deadlines_of_ended_requests_are_forgotten(rig: LoopRig) -> None:
    # Given thousands of requests that have ended long before their deadlines
    late_ms = int(time.time() * 1000) + 3_600_000
    rig.engine.steps = [[finished(f"{n}-0", [1])] for n in range(1, 2 * LEAST_CLEARED)]
    for number in range(1, 2 * LEAST_CLEARED):
        rig.bring(f"{number}-0", request=make_request(deadline_ms=late_ms))

    assert len(rig.loop._deadlines) <= LEAST_CLEARED + 2


def test_a_lost_lease_ends_the_term(rig: LoopRig) -> None:
    # Given a worker that loses its lease while requests run
    rig.deliver("1-0")
    rig.say(LeaseLost("w.1"))

    # I expect it to drop them, to report the loss once, and to ignore later events
    term = rig.sessions[0]
    assert not rig.engine.has
    assert not term.running
    assert rig.told == [Fenced("w.1")]
    rig.loop.inbox.put(LeaseLost("w.1"))
    rig.bring("2-0")
    assert rig.told == [Fenced("w.1")]
    assert not rig.engine.has

    # until it has a new name.
    rig.loop.inbox.put(Serve("w.2"))
    rig.bring("1-0", worker="w.2")
    assert rig.engine.has == ["1-0"]
    assert rig.sessions[1].running


def test_a_new_name_ends_the_earlier_term(rig: LoopRig) -> None:
    rig.deliver("1-0")
    rig.say(Serve("w.2"))

    assert not rig.engine.has
    assert not rig.sessions[0].running
    assert rig.loop.unfinished == 0


def test_a_worker_has_drained_once_everything_is_published(rig: LoopRig) -> None:
    # Given a worker that is told to drain in the middle of a request
    rig.deliver("1-0")
    rig.say(Drain())
    assert rig.told == []

    # I expect one report, when the request is finished and published.
    rig.engine.steps = [[finished("1-0", [1])]]
    rig.turn()
    rig.turn()
    rig.turn()
    assert rig.told == [Drained()]


def test_a_draining_worker_notices_a_publication_quickly(rig: LoopRig) -> None:
    # Given a request whose result is being published, while nothing comes in
    rig.deliver("1-0")
    rig.engine.steps = [[finished("1-0", [1])]]
    rig.say(Drain())
    rig.sessions[0].runs["1-0"] = Run(make_assignment(entry="1-0"), 0.0)
    rig.turn()
    assert rig.told == []
    assert rig.inbox.waits[-1] == DRAINING_WAIT_S

    # If it is published
    del rig.sessions[0].runs["1-0"]
    rig.turn()

    # I expect the loop to notice immediately, and to wait as before from then on.
    assert rig.told == [Drained()]
    rig.turn()
    assert rig.inbox.waits[-1] == IDLE_WAIT_S


@pytest.mark.parametrize(("command", "ends"), [(Stop(), True), (Unload(), False)])
def test_an_unload_ends_the_loop(rig: LoopRig, command: Stop | Unload, ends: bool) -> None:
    rig.deliver("1-0")
    rig.loop.inbox.put(command)

    rig.loop.run()

    assert not rig.sessions[0].running
    assert rig.engine.aborted == ["1-0"]
    assert rig.loop.is_stopped is ends


def test_a_request_for_another_model_is_not_answered(rig: LoopRig) -> None:
    rig.bring("1-0", request=make_request(model="other"))

    # It goes back to the yard, for a worker with that model.
    fault = RequestError("1-0", Code.INFERENCE_ERROR, "other is not served here")
    assert rig.sessions[0].given == [fault]
    assert not rig.engine.has


def test_a_worker_gives_up_its_lane_before_it_sleeps(rig: LoopRig) -> None:
    rig.deliver("1-0")
    rig.say(Sleep(2))

    assert not rig.sessions[0].running
    assert rig.engine.changes == [("sleep", 2, [])]
    rig.bring("2-0")
    assert not rig.engine.has


def test_a_sleep_ends_the_drain(rig: LoopRig) -> None:
    # Given a worker that was put to sleep before everything was published
    rig.deliver("1-0")
    rig.say(Drain())
    rig.say(Sleep(1))

    # If it wakes and serves again
    rig.say(Wake(), Serve("w.2"))

    # I expect it not to drain any more.
    assert rig.engine.changes == [("sleep", 1, []), ("wake", [])]
    assert [type(one) for one in rig.told] == [Asleep, Ready]
    assert rig.sessions[1].running


def test_a_reload_disturbs_no_request(rig: LoopRig) -> None:
    rig.deliver("1-0")
    rig.say(ReloadWeights("/step-2"))

    assert rig.sessions[0].running
    assert rig.engine.changes == [("reload", "/step-2", ["1-0"])]
    assert rig.told == [Done(ReloadWeights("/step-2"))]


def test_an_invalid_order_ends_nothing(rig: LoopRig) -> None:
    rig.loop.inbox.put(LoadModel(ModelSpec(name="other", path="models/other")))
    rig.bring("1-0")

    assert rig.engine.has == ["1-0"]


def test_tries_to_publish_count_as_progress(rig: LoopRig) -> None:
    before = rig.loop.progress
    rig.sessions[0].attempts += 1
    assert rig.loop.progress == before + 1

    rig.bring("1-0")
    assert rig.loop.progress == before + 2


def published(rig: LoopRig, assignment: Assignment, reply: Reply) -> None:
    """Report this result as published, in the rig's present session."""
    now = time.monotonic()
    rig.results.keep([(Run(assignment, now), Publication(assignment, reply))], now)


def test_a_known_result_is_answered_without_the_engine(rig: LoopRig) -> None:
    # Given a request whose result is published, and a later incarnation
    before = rig.bring("1-0")
    rig.engine.steps = [[finished("1-0", [5])]]
    rig.turn()
    reply = Reply(id=before.request.id, event="result", seq=0, tokens=b"", status="completed")
    published(rig, before, reply)
    rig.loop.inbox.put(Serve("w.2"))

    # If it comes again, and so does another request of that name
    values = {"worker": "w.2", "request": before.request}
    rig.deliver("9-0", sid=before.sid, attempt=2, **values)
    rig.deliver("10-0", sid="normal/77-0", **values)
    rig.turn()

    # I expect the first to get its result, and only the other to reach the engine.
    assert rig.sessions[1].given == [Remembered("9-0", reply)]
    assert rig.engine.has == ["10-0"]


def test_a_running_request_is_not_started_again(rig: LoopRig) -> None:
    """Given an entry that comes again, as after an outage."""
    assignment = rig.bring("1-0")
    run = rig.sessions[0].runs["1-0"]

    rig.say(Delivery("w.1", [assignment]))

    assert rig.engine.has == ["1-0"]
    assert rig.sessions[0].runs["1-0"] is run


def test_other_weights_answer_again(rig: LoopRig) -> None:
    # Given two requests, of which one has ended and one runs
    ended, runs = rig.deliver("1-0"), rig.bring("2-0")
    begun = rig.sessions[0].runs["2-0"]
    reply = Reply(id=ended.request.id, event="result", seq=0, tokens=b"", status="completed")
    published(rig, ended, reply)

    # If the weights change, and then the other one ends
    rig.say(ReloadWeights(""))
    rig.results.keep([(begun, Publication(begun.assignment, reply))], time.monotonic())

    assert rig.results.find(ended) is None
    assert rig.results.find(runs) is None
