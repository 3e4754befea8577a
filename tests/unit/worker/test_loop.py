"""The engine loop: assignments in, steps, events out, until the model has to go."""

from __future__ import annotations

import time

import pytest

from tests.support.builders import make_assignment, make_request
from tests.support.office import Office, finished
from tests.support.waiting import eventually
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment
from worker.engines import RequestFailed, TokenDelta
from worker.messages import (
    Drain,
    Drained,
    Fenced,
    LoadModel,
    Profile,
    ReloadWeights,
    ResetPrefixCache,
    Serve,
    Sleep,
    Stop,
    Unload,
    Wake,
)
from worker.models import ModelSpec
from worker.process.loop import (
    DRAINING_WAIT_S,
    IDLE_WAIT_S,
    LEAST_CLEARED,
    Delivery,
    LeaseLost,
    Stale,
)
from worker.process.outcomes import Expired, Remembered, Run


@pytest.fixture
def office() -> Office:
    return Office()


def test_assignment_to_events(office: Office) -> None:
    office.deliver("1-0")
    office.engine.steps = [[TokenDelta("1-0", 0, [5])], [finished("1-0", [5, 6])]]

    office.turn()
    assert (office.loop.steps, office.loop.unfinished) == (1, 1)
    office.turn()

    assert office.terms[0].given == [
        TokenDelta("1-0", 0, [5]),
        finished("1-0", [5, 6]),
    ]
    assert office.loop.unfinished == 0


def test_refused_request_is_answered(office: Office) -> None:
    office.engine.refuse = "is too long"
    office.deliver("1-0")

    office.turn()

    fault = RequestFailed("1-0", Code.INVALID_REQUEST, "prompt: is too long")
    assert office.terms[0].given == [fault]


def test_request_that_this_version_cannot_read_is_answered(office: Office) -> None:
    assignment = make_assignment(entry="1-0")
    unreadable = Assignment(
        request=assignment.request, entry="1-0", sid="normal/1-0", attempt=1, fault="params: x"
    )
    office.loop.inbox.put(Delivery("w.1", [unreadable]))

    office.turn()

    (fault,) = office.terms[0].given
    assert isinstance(fault, RequestFailed)
    assert "params: x" in fault.message
    assert not office.engine.has


def test_delivery_to_an_earlier_incarnation_is_dropped(office: Office) -> None:
    office.deliver("1-0", worker="w.0")

    office.turn()

    assert not office.engine.has
    assert office.loop.unfinished == 0


def test_stale_request_leaves_the_engine(office: Office) -> None:
    office.deliver("1-0")
    office.deliver("2-0")
    office.loop.inbox.put(Stale("w.1", "1-0"))
    office.loop.inbox.put(Stale("w.0", "2-0"))  # said of an earlier incarnation's entry

    office.turn()

    assert office.engine.has == ["2-0"]


@pytest.mark.parametrize(("made", "where"), [([1, 2], "running"), ([], "on the worker's lane")])
def test_deadline_ends_a_request(office: Office, made: list[int], where: str) -> None:
    # Given requests, of which two have deadlines, one of them soon
    office.engine.made = made
    now_ms = int(time.time() * 1000)
    for entry, deadline_ms in (("1-0", None), ("2-0", now_ms + 50), ("3-0", now_ms + 60_000)):
        office.deliver(entry, request=make_request(deadline_ms=deadline_ms))
    office.turn()
    assert office.engine.has == ["1-0", "2-0", "3-0"]

    # If that one's time comes
    eventually(lambda: office.turn() or "2-0" not in office.engine.has)

    # I expect it alone to end, with what has been made of it.
    expected = finished("2-0", made)
    assert office.terms[0].given == [Expired("2-0", expected, where)]
    assert office.engine.has == ["1-0", "3-0"]


def test_deadlines_go_by_the_servers_clock(office: Office) -> None:
    office.terms[0].clock_ms = 3_600_000.0  # the server's is an hour ahead
    in_an_hour = int(time.time() * 1000) + 3_600_000
    office.deliver("1-0", request=make_request(deadline_ms=in_an_hour - 1000))
    office.deliver("2-0", request=make_request(deadline_ms=in_an_hour + 60_000))

    office.turn()

    assert office.engine.has == ["2-0"]


def test_deadlines_of_what_has_ended_are_forgotten(office: Office) -> None:
    # Given thousands of requests that have ended long before their deadlines
    late_ms = int(time.time() * 1000) + 3_600_000
    office.engine.steps = [[finished(f"{n}-0", [1])] for n in range(1, 2 * LEAST_CLEARED)]
    for number in range(1, 2 * LEAST_CLEARED):
        office.deliver(f"{number}-0", request=make_request(deadline_ms=late_ms))
        office.turn()

    assert len(office.loop._deadlines) <= LEAST_CLEARED + 2


def test_lost_lease_ends_the_term(office: Office) -> None:
    # Given a worker that loses its lease while requests run
    office.deliver("1-0")
    office.loop.inbox.put(LeaseLost("w.1"))
    office.turn()

    # I expect it to drop them, to say so once, and to do nothing with what still comes
    term = office.terms[0]
    assert not office.engine.has
    assert not term.running
    assert office.told == [Fenced("w.1")]
    office.loop.inbox.put(LeaseLost("w.1"))
    office.deliver("2-0")
    office.turn()
    assert office.told == [Fenced("w.1")]
    assert not office.engine.has

    # until it has a new name.
    office.loop.inbox.put(Serve("w.2"))
    office.deliver("1-0", worker="w.2")
    office.turn()
    assert office.engine.has == ["1-0"]
    assert office.terms[1].running


def test_new_name_ends_the_earlier_term(office: Office) -> None:
    office.deliver("1-0")
    office.loop.inbox.put(Serve("w.2"))
    office.turn()

    assert not office.engine.has
    assert not office.terms[0].running
    assert office.loop.unfinished == 0


def test_drained_once_everything_is_published(office: Office) -> None:
    # Given a worker that is to drain in the middle of a request
    office.deliver("1-0")
    office.loop.inbox.put(Drain())
    office.turn()
    assert office.told == []

    # I expect it to say so, once, when the request is finished and published.
    office.engine.steps = [[finished("1-0", [1])]]
    office.turn()
    office.turn()
    office.turn()
    assert office.told == [Drained()]


def test_while_it_drains_it_does_not_wait_long(office: Office) -> None:
    # Given a request whose result is being published, while nothing comes in
    office.deliver("1-0")
    office.engine.steps = [[finished("1-0", [1])]]
    office.loop.inbox.put(Drain())
    office.turn()
    office.terms[0].runs["1-0"] = Run(make_assignment(entry="1-0"), 0.0)
    office.turn()
    assert office.told == []
    assert office.inbox.waits[-1] == DRAINING_WAIT_S

    # If it is published
    del office.terms[0].runs["1-0"]
    office.turn()

    # I expect it to be seen at once, and everything to be as before from then on.
    assert office.told == [Drained()]
    office.turn()
    assert office.inbox.waits[-1] == IDLE_WAIT_S


def test_drained_at_once_where_nothing_runs(office: Office) -> None:
    office.loop.inbox.put(Drain())
    office.turn()

    assert office.told == [Drained()]


@pytest.mark.parametrize(("command", "ends"), [(Stop(), True), (Unload(), False)])
def test_the_model_has_to_go(office: Office, command: Stop | Unload, ends: bool) -> None:
    office.deliver("1-0")
    office.loop.inbox.put(command)

    office.loop.run()

    assert not office.terms[0].running
    assert office.engine.aborted == ["1-0"]
    assert office.loop.is_stopped is ends


@pytest.mark.parametrize("name", ["", "sim", "lora"])
def test_names_of_the_model(office: Office, name: str) -> None:
    office.deliver("1-0", request=make_request(model=name))

    office.turn()

    assert office.engine.has == ["1-0"]


def test_another_model_is_not_answered_for(office: Office) -> None:
    office.deliver("1-0", request=make_request(model="other"))

    office.turn()

    # It goes back to the yard, for a worker that has it.
    fault = RequestFailed("1-0", Code.INFERENCE_ERROR, "other is not served here")
    assert office.terms[0].given == [fault]
    assert not office.engine.has


def test_before_it_sleeps_it_lets_go_of_its_lane(office: Office) -> None:
    office.deliver("1-0")
    office.loop.inbox.put(Sleep(2))
    office.turn()

    assert office.cared == [(Sleep(2), False, [])]
    office.deliver("2-0")
    office.turn()
    assert not office.engine.has


def test_what_sleeps_has_drained_for_good(office: Office) -> None:
    # Given a worker that was put to sleep before all it had was published
    office.deliver("1-0")
    office.loop.inbox.put(Drain())
    office.turn()
    office.loop.inbox.put(Sleep(1))
    office.turn()

    # If it wakes and serves again
    office.loop.inbox.put(Wake())
    office.loop.inbox.put(Serve("w.2"))
    office.turn()

    # I expect it to drain no more.
    assert [command for command, _, _ in office.cared] == [Sleep(1), Wake()]
    assert office.told == []
    assert office.terms[1].running


@pytest.mark.parametrize("command", [Wake(), ResetPrefixCache(), Profile(True)])
def test_what_disturbs_no_request(
    office: Office, command: Wake | ResetPrefixCache | Profile
) -> None:
    office.deliver("1-0")
    office.loop.inbox.put(command)
    office.turn()

    assert office.cared == [(command, True, ["1-0"])]


def test_a_command_that_makes_no_sense_ends_nothing(office: Office) -> None:
    office.loop.inbox.put(LoadModel(ModelSpec(name="other", path="models/other")))
    office.deliver("1-0")
    office.turn()

    assert office.engine.has == ["1-0"]


def test_tries_to_publish_are_progress(office: Office) -> None:
    before = office.loop.progress
    office.terms[0].attempts += 1
    assert office.loop.progress == before + 1

    office.deliver("1-0")
    office.turn()
    assert office.loop.progress == before + 2


def published(office: Office, assignment: Assignment, reply: Reply) -> None:
    """The publisher has published this result, in the office's present term."""
    office.ended.keep(Run(assignment, time.monotonic()), reply, time.monotonic())


def test_what_has_ended_is_answered_without_the_engine(office: Office) -> None:
    # Given a request whose result is published, and a later incarnation
    before = office.deliver("1-0")
    office.turn()
    office.engine.steps = [[finished("1-0", [5])]]
    office.turn()
    reply = Reply(id=before.request.id, event="result", seq=0, tokens=b"", status="completed")
    published(office, before, reply)
    office.loop.inbox.put(Serve("w.2"))

    # If it comes again, and so does another request of that name
    values = {"worker": "w.2", "request": before.request}
    office.deliver("9-0", sid=before.sid, attempt=2, **values)
    office.deliver("10-0", sid="normal/77-0", **values)
    office.turn()

    # I expect the first to have its result, and the engine to be asked for the other alone.
    assert office.terms[1].given == [Remembered("9-0", reply)]
    assert office.engine.has == ["10-0"]


def test_what_runs_is_not_begun_again(office: Office) -> None:
    """Given an entry that comes again, as it does after an outage."""
    assignment = office.deliver("1-0")
    office.turn()
    run = office.terms[0].runs["1-0"]

    office.loop.inbox.put(Delivery("w.1", [assignment]))
    office.turn()

    assert office.engine.has == ["1-0"]
    assert office.terms[0].runs["1-0"] is run


def test_other_weights_answer_anew(office: Office) -> None:
    # Given requests of which one has ended and one runs
    ended, runs = office.deliver("1-0"), office.deliver("2-0")
    office.turn()
    begun = office.terms[0].runs["2-0"]
    reply = Reply(id=ended.request.id, event="result", seq=0, tokens=b"", status="completed")
    published(office, ended, reply)

    # If the weights change, and then the other one ends
    office.loop.inbox.put(ReloadWeights(""))
    office.turn()
    office.ended.keep(begun, reply, time.monotonic())

    assert office.ended.find(ended) is None
    assert office.ended.find(runs) is None
