"""Inside a worker process: the engine loop, the publisher and the reader, on a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import redis

from tests.support.builders import make_assignment, make_request, worker_json
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import LONG_MS, Yard
from tokenyard.errors import Code, InvalidRequest
from tokenyard.keys import Keys
from tokenyard.replies import Choice, to_result
from tokenyard.scripts import Published, Scripts
from tokenyard.wire import Assignment, Request, pack_tokens, unpack_tokens
from worker.engines import EngineEvent, EngineInfo, Faulted, Finished, TokenDelta
from worker.loop import LEAST_CLEARED, Delivery, EngineLoop, LeaseLost, Stale, Term
from worker.messages import Drain, Drained, Fenced, Serve, Stop, ToController
from worker.outcomes import Expired, Run
from worker.publisher import MOST_WAITING, STEPS_AT_ONCE, Publisher
from worker.reader import LaneReader

INFO = EngineInfo("simulated", "1", "sim", "", max_model_len=100, vocab_size=100, slots=4)


def finished(key: str, tokens: list[int]) -> Finished:
    return Finished(key, [Choice(0, tokens, None, "length")], prompt_tokens=3)


@dataclass
class StubEngine:
    """Does nothing by itself: the test says what a step gives."""

    info: EngineInfo = INFO
    has: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    steps: list[list[EngineEvent]] = field(default_factory=list)
    refuse: str = ""
    made: list[int] = field(default_factory=list)

    def add(self, assignment: Assignment) -> None:
        if self.refuse:
            raise InvalidRequest("prompt", self.refuse)
        self.has.append(assignment.entry)

    def abort(self, keys: Iterable[str]) -> None:
        gone = list(keys)
        self.aborted += gone
        self.has = [key for key in self.has if key not in gone]

    def take_out(self, key: str) -> Finished | None:
        if key not in self.has:
            return None
        self.has.remove(key)
        return finished(key, self.made)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.has)

    def step(self) -> list[EngineEvent]:
        events = self.steps.pop(0) if self.steps else []
        ended = {event.key for event in events if not isinstance(event, TokenDelta)}
        self.has = [key for key in self.has if key not in ended]
        return events

    def close(self) -> None:
        pass


class StubPublisher:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.attempts = 0
        self.given: list[EngineEvent] = []
        self.running = False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def put(self, events: list[EngineEvent]) -> None:
        self.given += events
        for event in events:
            if not isinstance(event, TokenDelta):
                self.runs.pop(event.key, None)


class StubReader:
    def __init__(self) -> None:
        self.running = False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False


class Office:
    """An engine loop whose terms are stubs, and everything that it has said."""

    def __init__(self) -> None:
        self.engine = StubEngine()
        self.terms: list[Term] = []
        self.told: list[ToController] = []
        self.loop = EngineLoop(self.engine, self._term, self.told.append)
        self.loop.inbox.put(Serve("w.1"))
        self.turn()

    def _term(self, worker: str, loop: EngineLoop) -> Term:
        assert loop is self.loop
        term = Term(worker, StubReader(), StubPublisher())
        self.terms.append(term)
        return term

    def turn(self) -> None:
        self.loop.run_once()

    def deliver(self, entry: str, worker: str = "w.1", **values) -> Assignment:
        assignment = make_assignment(entry=entry, **values)
        self.loop.inbox.put(Delivery(worker, assignment))
        return assignment


@pytest.fixture
def office() -> Office:
    return Office()


class TestLoop:
    def test_assignment_to_events(self, office: Office) -> None:
        office.deliver("1-0")
        office.engine.steps = [[TokenDelta("1-0", 0, [5])], [finished("1-0", [5, 6])]]

        office.turn()
        assert (office.loop.steps, office.loop.unfinished) == (1, 1)
        office.turn()

        assert office.terms[0].publisher.given == [
            TokenDelta("1-0", 0, [5]),
            finished("1-0", [5, 6]),
        ]
        assert office.loop.unfinished == 0

    def test_refused_request_is_answered(self, office: Office) -> None:
        office.engine.refuse = "is too long"
        office.deliver("1-0")

        office.turn()

        fault = Faulted("1-0", Code.INVALID_REQUEST, "prompt: is too long")
        assert office.terms[0].publisher.given == [fault]

    def test_request_that_this_version_cannot_read_is_answered(self, office: Office) -> None:
        assignment = make_assignment(entry="1-0")
        unreadable = Assignment(
            request=assignment.request, entry="1-0", sid="normal/1-0", attempt=1, fault="params: x"
        )
        office.loop.inbox.put(Delivery("w.1", unreadable))

        office.turn()

        (fault,) = office.terms[0].publisher.given
        assert isinstance(fault, Faulted)
        assert "params: x" in fault.message
        assert not office.engine.has

    def test_delivery_to_an_earlier_incarnation_is_dropped(self, office: Office) -> None:
        office.deliver("1-0", worker="w.0")

        office.turn()

        assert not office.engine.has
        assert office.loop.unfinished == 0

    def test_stale_request_leaves_the_engine(self, office: Office) -> None:
        office.deliver("1-0")
        office.deliver("2-0")
        office.loop.inbox.put(Stale("w.1", "1-0"))
        office.loop.inbox.put(Stale("w.0", "2-0"))  # said of an earlier incarnation's entry

        office.turn()

        assert office.engine.has == ["2-0"]

    @pytest.mark.parametrize(("made", "where"), [([1, 2], "running"), ([], "on the worker's lane")])
    def test_deadline_ends_a_request(self, office: Office, made: list[int], where: str) -> None:
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
        assert office.terms[0].publisher.given == [Expired("2-0", expected, where)]
        assert office.engine.has == ["1-0", "3-0"]

    def test_deadlines_go_by_the_servers_clock(self, office: Office) -> None:
        office.terms[0].clock_ms = 3_600_000.0  # the server's is an hour ahead
        in_an_hour = int(time.time() * 1000) + 3_600_000
        office.deliver("1-0", request=make_request(deadline_ms=in_an_hour - 1000))
        office.deliver("2-0", request=make_request(deadline_ms=in_an_hour + 60_000))

        office.turn()

        assert office.engine.has == ["2-0"]

    def test_deadlines_of_what_has_ended_are_forgotten(self, office: Office) -> None:
        # Given thousands of requests that have ended long before their deadlines
        late_ms = int(time.time() * 1000) + 3_600_000
        office.engine.steps = [[finished(f"{n}-0", [1])] for n in range(1, 2 * LEAST_CLEARED)]
        for number in range(1, 2 * LEAST_CLEARED):
            office.deliver(f"{number}-0", request=make_request(deadline_ms=late_ms))
            office.turn()

        assert len(office.loop._deadlines) <= LEAST_CLEARED + 2

    def test_lost_lease_ends_the_term(self, office: Office) -> None:
        # Given a worker that loses its lease while requests run
        office.deliver("1-0")
        office.loop.inbox.put(LeaseLost("w.1"))
        office.turn()

        # I expect it to drop them, to say so once, and to do nothing with what still comes
        term = office.terms[0]
        assert not office.engine.has
        assert not term.reader.running
        assert not term.publisher.running
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
        assert office.terms[1].reader.running

    def test_new_name_ends_the_earlier_term(self, office: Office) -> None:
        office.deliver("1-0")
        office.loop.inbox.put(Serve("w.2"))
        office.turn()

        assert not office.engine.has
        assert not office.terms[0].publisher.running
        assert office.loop.unfinished == 0

    def test_drained_once_everything_is_published(self, office: Office) -> None:
        # Given a worker that is to drain in the middle of a request
        office.deliver("1-0")
        office.loop.inbox.put(Drain())
        office.turn()
        assert office.told == []

        # I expect it to say so, once, when the request is finished and published.
        office.engine.steps = [[finished("1-0", [1])]]
        office.turn()
        office.turn()
        office.loop.inbox.put(Stale("w.1", "9-9"))  # spares the wait of an idle turn
        office.turn()
        assert office.told == [Drained()]

    def test_stop_ends_the_term(self, office: Office) -> None:
        office.deliver("1-0")
        office.loop.inbox.put(Stop())

        office.loop.run()

        assert not office.terms[0].publisher.running
        assert office.engine.aborted == ["1-0"]


@dataclass
class Desk:
    """A publisher on a yard of its own, and what it reports."""

    yard: Yard
    worker: str
    publisher: Publisher
    stale: list[str]
    lost: list[bool]
    connection: redis.Redis

    def run(self, request: Request | None = None) -> Assignment:
        """A request that runs on the worker."""
        assignment = self.yard.assign(self.worker, request)
        self.publisher.runs[assignment.entry] = Run(assignment, 0.0)
        return assignment


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, scripts: Scripts) -> Yard:
    return Yard(connection, keys, scripts)


@pytest.fixture
def desk(yard: Yard, broker: Server) -> Iterator[Desk]:
    worker = yard.scripts.register("w", LONG_MS, worker_json("w"))
    stale: list[str] = []
    lost: list[bool] = []
    with redis.Redis.from_url(broker.url, socket_timeout=10.0) as own:
        publisher = Publisher(
            Scripts(own, yard.keys),
            worker,
            INFO,
            on_stale=stale.append,
            on_lost=lambda: lost.append(True),
        )
        yield Desk(yard, worker, publisher, stale, lost, own)
        publisher.stop()


class TestPublisher:
    def test_steps_that_have_gathered_travel_together(self, desk: Desk) -> None:
        # Given several steps of two streams, one of which has ended since
        on, ended = desk.run(make_request(stream=True)), desk.run(make_request(stream=True))
        for token in (1, 2, 3):
            desk.publisher.put(
                [TokenDelta(on.entry, 0, [token]), TokenDelta(ended.entry, 0, [token])]
            )
        desk.publisher.put([finished(ended.entry, [1, 2, 3, 4])])

        # If they are published in one turn
        desk.publisher.run_once()

        # I expect one delta of the stream that goes on, and of the other the result alone.
        (delta,) = desk.yard.replies(on.request)
        assert (delta.seq, unpack_tokens(delta.tokens)) == (0, [1, 2, 3])
        (result,) = desk.yard.replies(ended.request)
        assert (result.event, result.seq, unpack_tokens(result.tokens)) == (
            "result",
            0,
            [1, 2, 3, 4],
        )
        assert set(desk.publisher.runs) == {on.entry}

    def test_a_turn_is_bounded(self, desk: Desk) -> None:
        run = desk.run(make_request(stream=True))
        for token in range(2 * STEPS_AT_ONCE):
            desk.publisher.put([TokenDelta(run.entry, 0, [token])])

        desk.publisher.run_once()

        assert desk.yard.published(run.request) == pack_tokens(range(STEPS_AT_ONCE + 1))

    def test_seq_goes_on_where_the_last_attempt_ended(self, desk: Desk) -> None:
        # Given a stream that another worker has begun
        other = desk.yard.worker("other")
        request = make_request(stream=True)
        first = desk.yard.assign(other, request)
        publisher = Publisher(
            desk.yard.scripts, other, INFO, on_stale=desk.stale.append, on_lost=lambda: None
        )
        publisher.runs[first.entry] = Run(first, 0.0)
        publisher.put([TokenDelta(first.entry, 0, [1, 2])])
        publisher.run_once()
        desk.yard.expire(other)
        desk.yard.rescue(other)
        again = desk.yard.place(desk.yard.waiting(request), desk.worker)
        desk.publisher.runs[again.entry] = Run(again, 0.0)

        desk.publisher.put([TokenDelta(again.entry, 0, [3])])
        desk.publisher.run_once()
        desk.publisher.put([finished(again.entry, [1, 2, 3, 4])])
        desk.publisher.run_once()

        assert [reply.seq for reply in desk.yard.replies(request)] == [0, 2, 3]
        result = to_result(desk.yard.replies(request)[-1])
        assert (result.tokens, result.provenance.attempt) == ([1, 2, 3, 4], 2)
        assert result.provenance.worker == desk.worker

    def test_stale_request_is_reported_and_its_neighbours_are_published(self, desk: Desk) -> None:
        # Given two streams, one of which another attempt has
        taken, kept = desk.run(make_request(stream=True)), desk.run(make_request(stream=True))
        ledger = desk.yard.keys.ledger(taken.request.client, taken.request.id)
        desk.yard.connection.hset(ledger, "attempt", 2)

        desk.publisher.put([TokenDelta(taken.entry, 0, [1]), TokenDelta(kept.entry, 0, [2])])
        desk.publisher.run_once()
        desk.publisher.put([TokenDelta(taken.entry, 0, [9])])  # made before the engine let go
        desk.publisher.run_once()

        assert desk.stale == [taken.entry]
        assert desk.yard.replies(taken.request) == []
        assert desk.yard.published(kept.request) == pack_tokens([2])
        assert set(desk.publisher.runs) == {kept.entry}
        assert not desk.lost

    def test_fault_that_may_pass_goes_back_with_its_tokens(self, desk: Desk) -> None:
        # Given a stream that has shown two tokens, and a neighbour
        stream = desk.run(make_request("q1", stream=True))
        neighbour = desk.run(make_request("q2"))
        desk.publisher.put([TokenDelta(stream.entry, 0, [5, 6], None)])
        desk.publisher.run_once()

        # If the engine cannot serve it this time
        fault = Faulted(stream.entry, Code.INFERENCE_ERROR, "out of memory")
        desk.publisher.put([fault, finished(neighbour.entry, [9])])
        desk.publisher.run_once()

        # I expect it to wait for another time, with what was shown, and no result.
        ((_, fields),) = desk.yard.intake("retry")
        assert (fields[b"id"], fields[b"faults"]) == (b"q1", b"1")
        assert unpack_tokens(fields[b"published"]) == [5, 6]
        assert int(fields[b"not_before"]) > 0
        assert desk.yard.ledger(stream.request)["state"] == "waiting"
        assert desk.yard.ledger(neighbour.request)["state"] == "completed"
        assert desk.publisher.runs == {}
        assert desk.yard.lane(desk.worker) == []

    def test_fault_after_the_lease_was_lost(self, desk: Desk) -> None:
        running = desk.run()
        desk.yard.scripts.retire(desk.worker, "lost")

        desk.publisher.put([Faulted(running.entry, Code.INFERENCE_ERROR, "out of memory")])
        desk.publisher.run_once()

        assert desk.lost == [True]
        assert desk.yard.intake("retry") == []

    def test_lost_lease_is_reported_once_and_ends_it(self, desk: Desk) -> None:
        run = desk.run(make_request(stream=True))
        desk.publisher.start()
        desk.yard.expire(desk.worker)
        desk.yard.rescue(desk.worker)

        desk.publisher.put([TokenDelta(run.entry, 0, [1])])
        eventually(lambda: desk.lost)
        desk.publisher.put([finished(run.entry, [1])])

        eventually(lambda: not desk.publisher._thread.is_alive())
        assert desk.lost == [True]
        assert desk.yard.replies(run.request) == []

    def test_answer_that_was_lost_is_asked_for_again(self, desk: Desk) -> None:
        # Given a connection that breaks after each script has been carried out
        streaming, done = desk.run(make_request(stream=True)), desk.run()
        broken = _breaking(desk.publisher._scripts)
        desk.publisher.start()

        desk.publisher.put([TokenDelta(streaming.entry, 0, [1]), finished(done.entry, [7])])
        eventually(lambda: not broken)

        # I expect everything to be published once.
        eventually(lambda: done.entry not in desk.publisher.runs)
        assert len(desk.yard.replies(streaming.request)) == 1
        assert len(desk.yard.replies(done.request)) == 1
        assert not desk.stale
        assert not desk.lost

    def test_engine_waits_while_the_server_is_away(self, desk: Desk) -> None:
        # Given a publisher that cannot publish, and as many steps as may wait
        run = desk.run(make_request(stream=True))
        for token in range(MOST_WAITING):
            desk.publisher.put([TokenDelta(run.entry, 0, [token])])

        # If one more step is made
        put = threading.Thread(
            target=desk.publisher.put, args=([TokenDelta(run.entry, 0, [MOST_WAITING])],)
        )
        put.start()

        # I expect the engine's thread to wait, and to go on when the server is back.
        put.join(0.3)
        assert put.is_alive()
        desk.publisher.start()
        put.join(10.0)
        assert not put.is_alive()
        eventually(lambda: len(desk.yard.published(run.request)) == 4 * (MOST_WAITING + 1))

    def test_engine_does_not_wait_for_a_publisher_that_is_over(self, desk: Desk) -> None:
        run = desk.run(make_request(stream=True))
        for token in range(MOST_WAITING):
            desk.publisher.put([TokenDelta(run.entry, 0, [token])])
        put = threading.Thread(target=desk.publisher.put, args=([TokenDelta(run.entry, 0, [1])],))
        put.start()

        desk.publisher.stop()

        put.join(10.0)
        assert not put.is_alive()


def _breaking(scripts: Scripts) -> list[str]:
    """Make the first call of each publishing script lose its answer; who has not yet."""
    left = ["emit", "finish"]

    def once(name: str, call: Callable[..., list[Published]]) -> Callable[..., list[Published]]:
        def publish(*args) -> list[Published]:
            answer = call(*args)
            if name in left:
                left.remove(name)
                raise redis.ConnectionError("cut off")
            return answer

        return publish

    for name in left:
        setattr(scripts, name, once(name, getattr(scripts, name)))
    return left


class TestReader:
    @pytest.fixture
    def delivered(self) -> list[Assignment]:
        return []

    @pytest.fixture
    def cancelled(self) -> list[str]:
        return []

    @pytest.fixture
    def reader(
        self, yard: Yard, broker: Server, delivered: list[Assignment], cancelled: list[str]
    ) -> Iterator[LaneReader]:
        with redis.Redis.from_url(broker.url, socket_timeout=10.0) as own:
            reader = LaneReader(
                own, yard.keys, yard.worker(), delivered.append, cancelled.append, block_ms=100
            )
            yield reader
            reader.stop()
            reader._thread.join(5.0)

    def test_each_assignment_once_and_in_order(
        self, yard: Yard, reader: LaneReader, delivered: list[Assignment]
    ) -> None:
        worker = reader._lane.rpartition(":")[2]
        placed = [yard.assign(worker) for _ in range(3)]
        reader.start()
        eventually(lambda: delivered == placed)
        placed += [yard.assign(worker) for _ in range(3)]

        eventually(lambda: delivered == placed)
        assert len(yard.lane(worker)) == 6, "they stay until their results are published"

    def test_forged_entries_are_removed(
        self, yard: Yard, reader: LaneReader, delivered: list[Assignment]
    ) -> None:
        for fields in (
            {"x": "y"},
            {"id": "a", "prompt": "p"},
            {"id": "a", "prompt": "p", "attempt": "abc", "sid": "normal/1-0"},
            {"id": "a", "prompt": "p", "attempt": "1"},
            {"id": "a", "prompt": "p", "attempt": "1", "sid": "normal/1-0", "published": "abc"},
        ):
            yard.connection.xadd(reader._lane, fields)
        reader.start()

        eventually(lambda: not yard.connection.xlen(reader._lane))
        assert delivered == []

    def test_cancels_are_passed_on_and_taken_off_the_lane(
        self, yard: Yard, reader: LaneReader, cancelled: list[str]
    ) -> None:
        for entry in ("7-0", "8-0"):
            yard.connection.xadd(reader._lane, {"cancel": entry})
        reader.start()

        eventually(lambda: not yard.connection.xlen(reader._lane))
        assert cancelled == ["7-0", "8-0"]

    def test_it_goes_on_after_its_connection_was_killed(
        self, yard: Yard, reader: LaneReader, delivered: list[Assignment]
    ) -> None:
        worker = reader._lane.rpartition(":")[2]
        reader.start()
        first = yard.assign(worker)
        eventually(lambda: delivered == [first])
        yard.connection.client_kill_filter(_type="normal", skipme=True)

        second = yard.assign(worker)

        eventually(lambda: delivered == [first, second])

    def test_nothing_is_delivered_after_stop(
        self, yard: Yard, reader: LaneReader, delivered: list[Assignment]
    ) -> None:
        worker = reader._lane.rpartition(":")[2]
        reader.start()
        reader.stop()
        yard.assign(worker)

        reader._thread.join(5.0)

        assert delivered == []
