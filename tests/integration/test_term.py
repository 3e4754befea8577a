"""A term in the yard: what it reads reaches the loop, what the loop makes is published."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest
import redis

from tests.support.builders import make_request
from tests.support.office import INFO, StubEngine, finished
from tests.support.servers import Server, free_port
from tests.support.waiting import eventually
from tests.support.yard import Yard
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import to_result
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.scripts import Scripts
from worker.engines import TokenDelta
from worker.models import ModelSpec
from worker.process.lane_session import YardTerm, YardTerms
from worker.process.loop import Delivery, EngineLoop, Item, LeaseLost, Stale
from worker.process.outcomes import Run

SPEC = ModelSpec(name="sim", path="models/sim", sampling={"temperature": 0.5})


class Post:
    """One worker in office, whose loop is the test."""

    def __init__(self, yard: Yard, url: str) -> None:
        self.yard = yard
        self.worker = yard.worker()
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        settings = WorkerSettings(
            redis_url=url, yard=yard.keys.yard, engine="simulated", block_ms=100
        )
        terms = YardTerms(settings, SPEC, INFO)
        loop = EngineLoop(StubEngine(), self.inbox, terms, lambda _: None, lambda _: None)
        self.term: YardTerm = terms(self.worker, loop)

    def heard(self) -> Item:
        """What comes in next."""
        return self.inbox.get(timeout=10.0)

    def take(self) -> Delivery:
        """One assignment that has come in, as the loop takes it."""
        delivery = self.heard()
        assert isinstance(delivery, Delivery)
        [assignment] = delivery.assignments
        self.term.runs[assignment.entry] = Run(assignment, 0.0)
        return delivery


@pytest.fixture
def post(connection: redis.Redis, keys: Keys, scripts: Scripts, broker: Server) -> Iterator[Post]:
    made = Post(Yard(connection, keys, scripts), broker.url)
    yield made
    made.term.end()


def test_from_the_lane_to_the_result(post: Post) -> None:
    # Given a worker in office
    post.term.start()
    assert post.term.worker == post.worker

    # If a request comes and is answered
    assignment = post.yard.assign(post.worker, make_request(stream=True))
    delivery = post.take()
    post.term.put([TokenDelta(assignment.entry, 0, [5])])
    post.term.put([finished(assignment.entry, [5, 6])])

    # I expect it to have been this worker's, and the answer to be published.
    assert (delivery.worker, delivery.assignments[0].entry) == (post.worker, assignment.entry)
    eventually(lambda: not post.term.runs)
    result = post.yard.result(assignment.request)
    assert result
    provenance = to_result(result).provenance
    assert provenance
    assert (provenance.worker, provenance.model) == (post.worker, "sim")
    assert post.term.attempts > 0


def test_what_the_model_says_of_sampling_holds_where_a_request_says_nothing(post: Post) -> None:
    post.term.start()
    post.yard.assign(post.worker)

    assert post.take().assignments[0].request.params.temperature == 0.5


def test_cancelled_requests_are_reported(post: Post) -> None:
    post.term.start()
    post.yard.connection.xadd(post.yard.keys.lane(post.worker), {"cancel": "7-0"})

    assert post.heard() == Stale(post.worker, "7-0")


def test_a_lost_lease_is_reported(post: Post) -> None:
    post.term.start()
    assignment = post.yard.assign(post.worker)
    post.take()
    post.yard.scripts.retire(post.worker, "lost")

    post.term.put([finished(assignment.entry, [1])])

    assert post.heard() == LeaseLost(post.worker)


def test_nothing_is_read_after_its_end(post: Post) -> None:
    post.term.start()
    post.term.end()
    post.term.end()
    post.term._reader._thread.join(10.0)
    post.term._publisher._thread.join(10.0)
    post.yard.assign(post.worker)

    assert not post.term._reader._thread.is_alive()
    assert not post.term._publisher._thread.is_alive()
    assert post.inbox.empty()


def test_the_servers_clock(
    post: Post, broker: Server, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, micros = connection.time()
    assert abs(post.term.clock_ms - (seconds * 1000 + micros / 1000 - time.time() * 1000)) < 60_000

    # Given a clock of ours that is an hour slow
    actual = time.time
    monkeypatch.setattr("worker.process.lane_session.time.time", lambda: actual() - 3600)

    slow = Post(post.yard, broker.url)

    assert abs(slow.term.clock_ms - post.term.clock_ms - 3_600_000) < 60_000


def test_a_server_that_is_away_when_the_term_begins(post: Post) -> None:
    away = Post(post.yard, f"redis://127.0.0.1:{free_port()}")

    assert away.term.clock_ms == 0.0
