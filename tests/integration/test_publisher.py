"""The publisher, on a real server: an engine's output is published once and in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from tests.scripts.tenant_rig import dispatch, service, submit
from tests.support.builders import framed_elsewhere, make_request
from tests.support.fake_clock import FakeClock
from tests.support.loop_rig import INFO, finished
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.replies import decode_cached, to_result
from tokenyard.protocol.wire import Assignment, Request, pack_tokens, unpack_tokens
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Publication, Published
from tokenyard.telemetry.tracing import Tracer
from worker.engines import RequestError, TokenDelta
from worker.process.outcomes import Aborted, Run, charged_name
from worker.process.publisher import FEW_STREAMS, MOST_WAITING, STEPS_AT_ONCE, Publisher
from worker.process.recent_results import RecentResults
from worker.process.stats import RunningStats


def make_publisher(
    scripts: Scripts,
    worker: str,
    on_stale: Callable[[str, str], None] = lambda *_: None,
    on_lost: Callable[[], None] = lambda: None,
) -> Publisher:
    return Publisher(
        scripts,
        worker,
        INFO,
        on_stale=on_stale,
        on_lost=on_lost,
        stats=RunningStats(),
        tracer=Tracer("", ""),
        results=RecentResults(),
        stream_interval_ms=30,
    )


@dataclass
class Rig:
    """A publisher on a yard of its own, and its reports."""

    yard: PlayedYard
    worker: str
    publisher: Publisher
    stale: list[str]
    lost: list[bool]
    connection: redis.Redis

    def run(self, request: Request | None = None, epoch: int | None = None) -> Assignment:
        """A request that runs on the worker, begun in this epoch."""
        assignment = self.yard.assign(self.worker, request)
        self.publisher.runs[assignment.entry] = Run(assignment, 0.0, epoch)
        return assignment


@pytest.fixture
def rig(yard: PlayedYard, broker: Server) -> Iterator[Rig]:
    worker = yard.worker()
    stale: list[str] = []
    lost: list[bool] = []
    with redis.Redis.from_url(broker.url, socket_timeout=30.0) as own:
        publisher = make_publisher(
            Scripts(Yard(own, yard.keys)),
            worker,
            on_stale=lambda entry, charged: stale.append(entry + charged),
            on_lost=lambda: lost.append(True),
        )
        yield Rig(yard, worker, publisher, stale, lost, own)
        publisher.stop()


def test_waiting_steps_are_published_together(rig: Rig) -> None:
    # Given several steps of two streams, one of which has ended since
    on, ended = rig.run(make_request(stream=True)), rig.run(make_request(stream=True))
    for token in (1, 2, 3):
        rig.publisher.put([TokenDelta(on.entry, 0, [token]), TokenDelta(ended.entry, 0, [token])])
    rig.publisher.put([finished(ended.entry, [1, 2, 3, 4])])

    # If one turn publishes them
    rig.publisher.run_once()

    # I expect one delta of the running stream, and only the result of the other.
    (delta,) = rig.yard.replies(on.request)
    assert (delta.seq, unpack_tokens(delta.tokens)) == (0, [1, 2, 3])
    (result,) = rig.yard.replies(ended.request)
    assert (result.event, result.seq, unpack_tokens(result.tokens)) == (
        "result",
        0,
        [1, 2, 3, 4],
    )
    assert set(rig.publisher.runs) == {on.entry}


def test_a_stream_has_one_delta_in_its_interval(rig: Rig, fake_clock: FakeClock) -> None:
    # Given streams of 125 ms, of each token, and one that names nothing, beside few others
    slow, each = (
        rig.run(make_request(stream=True, stream_interval_ms=interval)) for interval in (125, 0)
    )
    silent = rig.run(make_request(stream=True))
    tokens = itertools.count()

    def step() -> None:
        for run in (slow, each, silent):
            rig.publisher.put([TokenDelta(run.entry, 0, [next(tokens)])])
            rig.publisher.run_once()
        fake_clock.advance(1 / 64)

    def shown(run: Assignment) -> list[int]:
        return [len(reply.tokens) // 4 for reply in rig.yard.replies(run.request)]

    # If each makes 64 tokens a second, I expect two at once, and then one delta each 125 ms,
    for _ in range(9):
        step()
    assert [shown(run) for run in (slow, each, silent)] == [[1, 1], [1] * 9, [1] * 9]
    step()
    assert shown(slow) == [1, 1, 8]
    # also where no further step comes, and the end at once, which has all tokens.
    step()
    fake_clock.advance(0.125)
    rig.publisher.run_once()
    assert shown(slow) == [1, 1, 8, 1]
    step()
    rig.publisher.put([finished(slow.entry, range(13))])
    rig.publisher.run_once()
    *_, result = rig.yard.replies(slow.request)
    assert (result.event, result.seq, len(result.tokens) // 4) == ("result", 11, 13)


def test_beside_many_a_stream_has_the_usual_interval(rig: Rig, fake_clock: FakeClock) -> None:
    many = [rig.run(make_request(stream=True)) for _ in range(FEW_STREAMS + 1)]
    for token in range(4):
        rig.publisher.put([TokenDelta(run.entry, 0, [token]) for run in many])
        rig.publisher.run_once()
        fake_clock.advance(0.01)
    assert {len(rig.yard.replies(run.request)) for run in many} == {2}


def test_the_ledger_keeps_what_the_first_delta_says_of_the_cache(rig: Rig) -> None:
    run = rig.run(framed_elsewhere(stream=True))
    for cached in (16, None):
        rig.publisher.put([TokenDelta(run.entry, 0, [1], cached_tokens=cached)])
        rig.publisher.run_once()
    assert decode_cached(rig.yard.ledger(run.request)["cached"].encode()) == (16, None)


def test_a_turn_is_bounded(rig: Rig) -> None:
    run = rig.run(make_request(stream=True))
    for token in range(2 * STEPS_AT_ONCE):
        rig.publisher.put([TokenDelta(run.entry, 0, [token])])

    rig.publisher.run_once()

    assert rig.yard.published(run.request) == pack_tokens(range(STEPS_AT_ONCE + 1))


def test_waiting_steps_keep_the_epoch_in_which_they_were_made(rig: Rig) -> None:
    # Given streams that end before and after the epoch changes, with all steps unpublished
    before, across = (rig.run(make_request(stream=True), epoch=7) for _ in range(2))
    rig.publisher.put([TokenDelta(before.entry, 0, [1]), TokenDelta(across.entry, 0, [1])], 7)
    rig.publisher.put([finished(before.entry, [1, 2])], 7)
    after = rig.run(make_request(stream=True), epoch=8)
    rig.publisher.put([TokenDelta(across.entry, 0, [2]), TokenDelta(after.entry, 0, [1])], 8)
    rig.publisher.put([finished(across.entry, [1, 2, 3]), finished(after.entry, [1, 2])], 8)

    # If one turn publishes them
    rig.publisher.run_once()

    # I expect each result to name its epochs, and no token twice or missing.
    made = [to_result(rig.yard.result(one.request)).provenance for one in (before, across, after)]
    assert [(one.epoch, one.first_epoch) for one in made] == [(7, None), (8, 7), (8, None)]
    replies = rig.yard.replies(across.request)
    assert [(reply.seq, unpack_tokens(reply.tokens)) for reply in replies] == [
        (0, [1]),
        (1, [1, 2, 3]),
    ]
    assert rig.yard.ledger(across.request)["epoch"] == "7"


def test_seq_and_epoch_of_a_stream_continue_on_its_next_worker(rig: Rig) -> None:
    # Given a stream that another worker has begun in epoch 7
    other, request = rig.yard.worker("other"), make_request(stream=True)
    first = rig.yard.assign(other, request)
    publisher = make_publisher(rig.yard.scripts, other)
    publisher.runs[first.entry] = Run(first, 0.0, epoch=7)
    publisher.put([TokenDelta(first.entry, 0, [1, 2])], 7)
    publisher.run_once()
    rig.yard.lose(other)

    # If it continues in epoch 8
    again = rig.yard.place(rig.yard.waiting(request), rig.worker)
    rig.publisher.runs[again.entry] = Run(again, 0.0, epoch=8)
    rig.publisher.put([TokenDelta(again.entry, 0, [3])], 8)
    rig.publisher.run_once()
    rig.publisher.put([finished(again.entry, [1, 2, 3, 4])], 8)
    rig.publisher.run_once()

    assert [reply.seq for reply in rig.yard.replies(request)] == [0, 2, 3]
    result = to_result(rig.yard.result(request))
    made = result.provenance
    assert (result.tokens, made.worker, made.attempt) == ([1, 2, 3, 4], rig.worker, 2)
    assert (made.epoch, made.first_epoch) == (8, 7)


def test_a_stale_request_is_reported_and_its_neighbours_are_published(rig: Rig) -> None:
    # Given two streams, one of which belongs to another attempt
    taken, kept = rig.run(make_request(stream=True)), rig.run(make_request(stream=True))
    ledger = rig.yard.keys.ledger(taken.request.client, taken.request.id)
    rig.yard.connection.hset(ledger, "attempt", 2)

    rig.publisher.put([TokenDelta(taken.entry, 0, [1]), TokenDelta(kept.entry, 0, [2])])
    rig.publisher.run_once()
    rig.publisher.put([TokenDelta(taken.entry, 0, [9])])  # made before the engine dropped it
    rig.publisher.run_once()

    assert rig.stale == [taken.entry]
    assert rig.yard.replies(taken.request) == []
    assert rig.yard.published(kept.request) == pack_tokens([2])
    assert set(rig.publisher.runs) == {kept.entry}
    assert not rig.lost


def test_a_temporary_fault_gives_the_request_back_with_its_tokens(rig: Rig) -> None:
    # Given a stream that has published two tokens, and a neighbour
    stream = rig.run(make_request("q1", stream=True))
    neighbour = rig.run(make_request("q2"))
    rig.publisher.put([TokenDelta(stream.entry, 0, [5, 6], None)])
    rig.publisher.run_once()

    # If the engine cannot serve it this time
    fault = RequestError(stream.entry, Code.INFERENCE_ERROR, "out of memory")
    rig.publisher.put([fault, finished(neighbour.entry, [9])])
    rig.publisher.run_once()

    # I expect it to wait with its published tokens, and no result.
    ((_, fields),) = rig.yard.intake("retry")
    assert (fields[b"id"], fields[b"faults"]) == (b"q1", b"1")
    assert fields[b"base_model"] == b"sim"
    assert unpack_tokens(fields[b"published"]) == [5, 6]
    assert int(fields[b"not_before"]) > 0
    assert rig.yard.ledger(stream.request)["state"] == "waiting"
    assert rig.yard.ledger(neighbour.request)["state"] == "completed"
    assert rig.publisher.runs == {}
    assert rig.yard.lane(rig.worker) == []


def test_a_fault_after_a_lost_lease_gives_nothing_back(rig: Rig) -> None:
    running = rig.run()
    rig.yard.scripts.retire(rig.worker, "lost")

    rig.publisher.put([RequestError(running.entry, Code.INFERENCE_ERROR, "out of memory")])
    rig.publisher.run_once()

    assert rig.lost == [True]
    assert rig.yard.intake("retry") == []


def test_a_lost_lease_is_reported_once_and_ends_the_term(rig: Rig) -> None:
    run = rig.run(make_request(stream=True))
    rig.publisher.start()
    rig.yard.lose(rig.worker)

    rig.publisher.put([TokenDelta(run.entry, 0, [1])])
    eventually(lambda: rig.lost)
    rig.publisher.put([finished(run.entry, [1])])

    eventually(lambda: not rig.publisher._thread.is_alive())
    assert rig.lost == [True]
    assert rig.yard.replies(run.request) == []


def test_a_script_whose_reply_was_lost_runs_again(rig: Rig) -> None:
    # Given a connection that breaks after each script has run
    streaming, done = rig.run(make_request(stream=True)), rig.run()
    broken = _breaking(rig.publisher._scripts)
    rig.publisher.start()

    rig.publisher.put([TokenDelta(streaming.entry, 0, [1]), finished(done.entry, [7])])
    eventually(lambda: not broken)

    # I expect everything to be published once.
    eventually(lambda: done.entry not in rig.publisher.runs)
    assert len(rig.yard.replies(streaming.request)) == 1
    assert len(rig.yard.replies(done.request)) == 1
    assert not rig.stale
    assert not rig.lost


def test_the_engine_waits_while_the_server_is_away(rig: Rig, fake_clock: FakeClock) -> None:
    # Given a publisher that cannot publish, and as many steps as may wait
    run = rig.run(make_request(stream=True))
    for token in range(MOST_WAITING):
        rig.publisher.put([TokenDelta(run.entry, 0, [token])])

    # If one more step is made
    put = threading.Thread(
        target=rig.publisher.put, args=([TokenDelta(run.entry, 0, [MOST_WAITING])],)
    )
    began = fake_clock.now
    put.start()

    # I expect the engine's thread to wait, and to continue when the server is back.
    eventually(lambda: fake_clock.now > began + 60.0)
    assert put.is_alive()
    rig.publisher.start()
    put.join(30.0)
    assert not put.is_alive()
    eventually(lambda: len(rig.yard.published(run.request)) == 4 * (MOST_WAITING + 1))


def test_the_engine_does_not_wait_for_a_publisher_that_has_ended(rig: Rig) -> None:
    run = rig.run(make_request(stream=True))
    for token in range(MOST_WAITING):
        rig.publisher.put([TokenDelta(run.entry, 0, [token])])
    put = threading.Thread(target=rig.publisher.put, args=([TokenDelta(run.entry, 0, [1])],))
    put.start()

    rig.publisher.stop()

    put.join(30.0)
    assert not put.is_alive()


class TestSettle:
    """What the publisher reports of requests that were cancelled, and are charged."""

    def cancelled(self, rig: Rig, **fields: Any) -> Assignment:
        """A running request of a tenant, which has been cancelled."""
        assignment = dispatch(rig.yard, rig.worker, submit(rig.yard))
        rig.publisher.runs[assignment.entry] = Run(assignment, 0.0)
        rig.yard.scripts.cancel(assignment.request.client, assignment.request.id, "enough")
        return assignment

    def test_what_was_generated_is_paid(self, rig: Rig) -> None:
        one, two = self.cancelled(rig), self.cancelled(rig)
        for run, made in ((one, [1, 2, 3]), (two, [4])):
            name = charged_name(run)
            rig.publisher.settle(Aborted(run.entry, name, finished(run.entry, made)))

        rig.publisher.run_once()

        assert service(rig.yard) == 2 * 3 + 2 * (3 + 1)
        assert rig.yard.ledger(one.request)["used"] == "3 3"

    def test_a_result_that_comes_too_late_is_paid(self, rig: Rig) -> None:
        run = self.cancelled(rig)

        rig.publisher.put([finished(run.entry, [1, 2, 3, 4])])
        rig.publisher.run_once()

        assert service(rig.yard) == 3 + 2 * 4
        assert rig.yard.result(run.request).status == "cancelled"
        assert not rig.publisher.runs

    def test_a_fault_of_the_engine_that_comes_too_late_is_told_to_the_loop(self, rig: Rig) -> None:
        run = self.cancelled(rig)

        rig.publisher.put([RequestError(run.entry, Code.INFERENCE_ERROR, "no memory")])
        rig.publisher.run_once()

        assert rig.stale == [f"{run.entry}{run.request.client}/{run.request.id}"]

    def test_a_call_whose_answer_is_lost_is_repeated(self, rig: Rig) -> None:
        run = self.cancelled(rig)
        rig.publisher.settle(Aborted(run.entry, charged_name(run), finished(run.entry, [1])))
        call, left = rig.publisher._scripts.settle_cancelled, [1]

        def settle(*args: Any) -> list[bool]:
            answer = call(*args)
            if left:
                left.pop()
                raise redis.ConnectionError("cut off")
            return answer

        rig.publisher._scripts.settle_cancelled = settle  # type: ignore[method-assign]
        rig.publisher.run_once()

        assert not left
        assert service(rig.yard) == 3 + 2 * 1


def _breaking(scripts: Scripts) -> list[str]:
    """Lose the reply of the first call of each publishing script; return those still to fail."""
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


def test_a_stream_whose_published_tokens_are_lost_is_given_back(rig: Rig) -> None:
    """Given a server that returned without its last writes, also those of a running stream."""
    run = rig.run(make_request(stream=True))
    rig.publisher.put([TokenDelta(run.entry, 0, [1, 2, 3])])
    rig.publisher.run_once()
    tokens = rig.yard.keys.tokens(run.request.client, run.request.id)
    rig.yard.connection.set(tokens, pack_tokens([1]))

    rig.publisher.put([TokenDelta(run.entry, 0, [4])])
    rig.publisher.run_once()

    assert rig.stale == [run.entry]
    assert not rig.yard.lane(rig.worker)
    again = rig.yard.place(rig.yard.waiting(run.request), rig.worker)
    assert unpack_tokens(again.published) == [1]
    assert not rig.lost


def test_an_attempt_is_compared_at_first_and_again_after_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose last step was just now
    run, given = rig.run(make_request(stream=True)), []
    scripts = rig.publisher._scripts
    emit = scripts.emit

    def spied(worker: str, items: list[Publication], until: int) -> list[Published]:
        given.append(([one.is_trusted for one in items], until - scripts.emitted_ms))
        return emit(worker, items, until)

    monkeypatch.setattr(scripts, "emit", spied)
    for token in (1, 2, 3, 4):
        if token == 3:
            monkeypatch.setattr("worker.process.publisher.TRUSTED_MS", 0)
        rig.publisher.put([TokenDelta(run.entry, 0, [token])])
        rig.publisher.run_once()

    assert given == [([False], 100), ([True], 100), ([False], 100), ([False], 100)]
    assert rig.yard.published(run.request) == pack_tokens([1, 2, 3, 4])


def test_an_attempt_is_compared_where_the_clock_of_the_server_was_set_back(rig: Rig) -> None:
    run = rig.publisher.runs[rig.run(make_request(stream=True)).entry]
    rig.publisher._scripts.emitted_ms = run.compared_ms = 5_000
    assert rig.publisher._is_trusted(run)
    rig.publisher._scripts.emitted_ms = 4_000
    assert not rig.publisher._is_trusted(run)
