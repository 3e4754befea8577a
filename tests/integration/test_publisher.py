"""The publisher, on a real server: what an engine makes is published once, and in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import redis

from tests.support.builders import make_request, worker_json
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import LONG_MS, Yard
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Choice, to_result
from tokenyard.protocol.wire import Assignment, Request, pack_tokens, unpack_tokens
from tokenyard.scripts import Published, Scripts
from worker.engines import EngineInfo, Finished, RequestError, TokenDelta
from worker.process.outcomes import Run
from worker.process.publisher import MOST_WAITING, STEPS_AT_ONCE, Publisher

INFO = EngineInfo("simulated", "1", "sim", "", max_model_len=100, vocab_size=100, slots=4)


def finished(key: str, tokens: list[int]) -> Finished:
    return Finished(key, [Choice(0, tokens, None, "length")], prompt_tokens=3)


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
        """A request that runs on the worker, begun in the present epoch."""
        assignment = self.yard.assign(self.worker, request)
        self.publisher.runs[assignment.entry] = Run(assignment, 0.0, self.publisher.epoch)
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


def test_steps_that_have_gathered_travel_together(desk: Desk) -> None:
    # Given several steps of two streams, one of which has ended since
    on, ended = desk.run(make_request(stream=True)), desk.run(make_request(stream=True))
    for token in (1, 2, 3):
        desk.publisher.put([TokenDelta(on.entry, 0, [token]), TokenDelta(ended.entry, 0, [token])])
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


def test_a_turn_is_bounded(desk: Desk) -> None:
    run = desk.run(make_request(stream=True))
    for token in range(2 * STEPS_AT_ONCE):
        desk.publisher.put([TokenDelta(run.entry, 0, [token])])

    desk.publisher.run_once()

    assert desk.yard.published(run.request) == pack_tokens(range(STEPS_AT_ONCE + 1))


def test_seq_goes_on_where_the_last_attempt_ended(desk: Desk) -> None:
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


def test_what_waits_to_be_published_keeps_the_epoch_in_which_it_was_made(desk: Desk) -> None:
    # Given streams that end before and after the epoch changes, and all steps still unpublished
    desk.publisher.epoch = 7
    before, across = desk.run(make_request(stream=True)), desk.run(make_request(stream=True))
    desk.publisher.put([TokenDelta(before.entry, 0, [1]), TokenDelta(across.entry, 0, [1])])
    desk.publisher.put([finished(before.entry, [1, 2])])
    desk.publisher.epoch = 8
    after = desk.run(make_request(stream=True))
    desk.publisher.put([TokenDelta(across.entry, 0, [2]), TokenDelta(after.entry, 0, [1])])
    desk.publisher.put([finished(across.entry, [1, 2, 3]), finished(after.entry, [1, 2])])

    # If they are published in one turn
    desk.publisher.run_once()

    # I expect each result to name its epochs, and no token twice or missing.
    made = [to_result(desk.yard.result(one.request)).provenance for one in (before, across, after)]
    assert [(one.epoch, one.first_epoch) for one in made] == [(7, None), (8, 7), (8, None)]
    replies = desk.yard.replies(across.request)
    assert [(reply.seq, unpack_tokens(reply.tokens)) for reply in replies] == [
        (0, [1]),
        (1, [1, 2, 3]),
    ]
    assert desk.yard.ledger(across.request)["epoch"] == "7"


def test_epoch_goes_on_with_a_stream_to_its_next_worker(desk: Desk) -> None:
    # Given a stream that another worker has begun in epoch 7
    other, request = desk.yard.worker("other"), make_request(stream=True)
    first = desk.yard.assign(other, request)
    publisher = Publisher(
        desk.yard.scripts, other, INFO, on_stale=desk.stale.append, on_lost=lambda: None
    )
    publisher.epoch = 7
    publisher.runs[first.entry] = Run(first, 0.0, epoch=7)
    publisher.put([TokenDelta(first.entry, 0, [1, 2])])
    publisher.run_once()
    desk.yard.expire(other)
    desk.yard.rescue(other)

    # If it goes on in epoch 8
    desk.publisher.epoch = 8
    again = desk.yard.place(desk.yard.waiting(request), desk.worker)
    desk.publisher.runs[again.entry] = Run(again, 0.0, epoch=8)
    desk.publisher.put([TokenDelta(again.entry, 0, [3])])
    desk.publisher.run_once()
    desk.publisher.put([finished(again.entry, [1, 2, 3, 4])])
    desk.publisher.run_once()

    made = to_result(desk.yard.result(request)).provenance
    assert (made.epoch, made.first_epoch, made.attempt) == (8, 7, 2)
    assert [reply.seq for reply in desk.yard.replies(request)] == [0, 2, 3]


def test_stale_request_is_reported_and_its_neighbours_are_published(desk: Desk) -> None:
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


def test_fault_that_may_pass_goes_back_with_its_tokens(desk: Desk) -> None:
    # Given a stream that has shown two tokens, and a neighbour
    stream = desk.run(make_request("q1", stream=True))
    neighbour = desk.run(make_request("q2"))
    desk.publisher.put([TokenDelta(stream.entry, 0, [5, 6], None)])
    desk.publisher.run_once()

    # If the engine cannot serve it this time
    fault = RequestError(stream.entry, Code.INFERENCE_ERROR, "out of memory")
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


def test_fault_after_the_lease_was_lost(desk: Desk) -> None:
    running = desk.run()
    desk.yard.scripts.retire(desk.worker, "lost")

    desk.publisher.put([RequestError(running.entry, Code.INFERENCE_ERROR, "out of memory")])
    desk.publisher.run_once()

    assert desk.lost == [True]
    assert desk.yard.intake("retry") == []


def test_lost_lease_is_reported_once_and_ends_it(desk: Desk) -> None:
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


def test_answer_that_was_lost_is_asked_for_again(desk: Desk) -> None:
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


def test_engine_waits_while_the_server_is_away(desk: Desk) -> None:
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


def test_engine_does_not_wait_for_a_publisher_that_is_over(desk: Desk) -> None:
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


def test_a_stream_whose_published_tokens_are_lost_is_given_back(desk: Desk) -> None:
    """Given a server that came back without its last writes, a running stream among them."""
    run = desk.run(make_request(stream=True))
    desk.publisher.put([TokenDelta(run.entry, 0, [1, 2, 3])])
    desk.publisher.run_once()
    tokens = desk.yard.keys.tokens(run.request.client, run.request.id)
    desk.yard.connection.set(tokens, pack_tokens([1]))

    desk.publisher.put([TokenDelta(run.entry, 0, [4])])
    desk.publisher.run_once()

    assert desk.stale == [run.entry]
    assert not desk.yard.lane(desk.worker)
    again = desk.yard.place(desk.yard.waiting(run.request), desk.worker)
    assert unpack_tokens(again.published) == [1]
    assert not desk.lost
