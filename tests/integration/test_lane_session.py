"""A lane session in Redis: assignments reach the inbox, events are published."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from tests.support.builders import make_request
from tests.support.fake_clock import FakeClock
from tests.support.loop_rig import INFO, finished
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.clock import MEASURE_EVERY_S
from tokenyard.protocol.replies import to_result
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.telemetry.tracing import Tracer
from worker.engines import TokenDelta
from worker.messages import Delivery, LeaseLost, ToProcess
from worker.models import ModelSpec
from worker.process.lane_session import RedisLaneSession
from worker.process.outcomes import Run
from worker.process.recent_results import RecentResults
from worker.process.stats import RunningStats

SPEC = ModelSpec(name="sim", path="models/sim", sampling={"temperature": 0.5})


class Rig:
    """A lane session; the test plays the engine loop."""

    def __init__(self, yard: PlayedYard, url: str) -> None:
        self.yard = yard
        self.worker = yard.worker()
        self.inbox: queue.SimpleQueue[ToProcess] = queue.SimpleQueue()
        settings = WorkerSettings(
            redis_url=url, yard=yard.keys.yard, engine="simulated", block_ms=100
        )
        self.session = RedisLaneSession(
            settings,
            SPEC,
            INFO,
            self.worker,
            self.inbox,
            stats=RunningStats(),
            tracer=Tracer("", ""),
            results=RecentResults(),
        )

    def heard(self) -> ToProcess:
        """The next item of the inbox."""
        return self.inbox.get(timeout=30.0)

    def take(self) -> Delivery:
        """The next delivery, taken as the loop does."""
        delivery = self.heard()
        assert isinstance(delivery, Delivery)
        [assignment] = delivery.assignments
        self.session.runs[assignment.entry] = Run(assignment, 0.0)
        return delivery


@pytest.fixture
def rig(yard: PlayedYard, broker: Server) -> Iterator[Rig]:
    made = Rig(yard, broker.url)
    yield made
    made.session.end()


def test_an_assignment_of_the_lane_gets_its_result_published(rig: Rig) -> None:
    # Given a session that was started
    rig.session.start()
    assert rig.session.worker == rig.worker

    # If a request comes and is answered
    assignment = rig.yard.assign(rig.worker, make_request(stream=True))
    delivery = rig.take()
    rig.session.put([TokenDelta(assignment.entry, 0, [5])])
    rig.session.put([finished(assignment.entry, [5, 6])])

    # I expect it to have been this worker's, and the answer to be published.
    assert (delivery.worker, delivery.assignments[0].entry) == (rig.worker, assignment.entry)
    assert delivery.assignments[0].request.params.temperature == 0.5, "the default of the model"
    eventually(lambda: not rig.session.runs)
    result = rig.yard.result(assignment.request)
    assert result
    provenance = to_result(result).provenance
    assert provenance
    assert (provenance.worker, provenance.model) == (rig.worker, "sim")
    assert rig.session.attempts > 0


def test_a_lost_lease_is_reported(rig: Rig) -> None:
    rig.session.start()
    assignment = rig.yard.assign(rig.worker)
    rig.take()
    rig.yard.scripts.retire(rig.worker, "lost")

    rig.session.put([finished(assignment.entry, [1])])

    assert rig.heard() == LeaseLost(rig.worker)


def test_an_ended_session_reads_nothing(rig: Rig) -> None:
    rig.session.start()
    rig.session.end()
    rig.session.end()
    rig.session._reader._thread.join(30.0)
    rig.session._publisher._thread.join(30.0)
    rig.yard.assign(rig.worker)

    assert not rig.session._reader._thread.is_alive()
    assert not rig.session._publisher._thread.is_alive()
    assert rig.inbox.empty()


def test_deadlines_are_by_the_brokers_clock_whatever_ours_says(
    yard: PlayedYard, broker: Server, fake_clock: FakeClock
) -> None:
    # Given a worker whose clock is years from the broker's
    rig = Rig(yard, broker.url)
    before_ms = yard.now_ms
    assert rig.session.broker_time.now_ms > before_ms + 60_000
    rig.session._reader._measure_time()
    # I expect it to know the broker's after its first read,
    assert before_ms <= int(rig.session.broker_time.now_ms) <= yard.now_ms
    # a step of its own to change nothing,
    fake_clock.step(-3600.0)
    assert before_ms <= int(rig.session.broker_time.now_ms) <= yard.now_ms
    # and an outage, or time, to have it ask again.
    assert not rig.session.broker_time.is_due
    rig.session._reader._on_outage()
    assert rig.session.broker_time.is_due
    rig.session._reader._measure_time()
    fake_clock.advance(MEASURE_EVERY_S)
    assert rig.session.broker_time.is_due
