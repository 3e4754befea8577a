"""A lane session: the time in which a process serves the lane of one incarnation of a worker."""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping, Sequence
from typing import Protocol

import redis

from tokenyard.broker.connection import BLOCK_MARGIN_S, open_connection
from tokenyard.clock import BrokerTime
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts
from tokenyard.telemetry.tracing import Tracer
from worker.engines import EngineInfo
from worker.models import ModelSpec
from worker.process.inbox import Delivery, InboxItem, LeaseLost, Stale
from worker.process.outcomes import Aborted, Outcome, Run
from worker.process.publisher import Publisher
from worker.process.reader import LaneReader
from worker.process.recent_results import RecentResults
from worker.process.spans import EngineSpans
from worker.process.stats import RunningStats

log = logging.getLogger("tokenyard.worker.lane")


class LaneSession(Protocol):
    """Where the assignments of one incarnation come from, and its right to publish."""

    #: The generation epoch of the events that are made from now on.
    epoch: int | None

    @property
    def worker(self) -> str:
        """The incarnation."""

    @property
    def broker_time(self) -> BrokerTime:
        """The clock that deadlines refer to."""

    @property
    def runs(self) -> dict[str, Run]:
        """The requests that were taken and are unanswered, by lane entry."""

    @property
    def attempts(self) -> int:
        """Tries to publish: a sign of life while the server is away."""

    def start(self) -> None:
        """Begin reading and publishing."""

    def put(self, events: Sequence[Outcome]) -> None:
        """Publish the events of one step; blocks while too many steps wait."""

    def settle(self, aborted: Aborted) -> None:
        """Let the tenant of a cancelled request pay what was generated."""

    def note_made(self, made: Mapping[str, int]) -> None:
        """Count the tokens made so far of unfinished requests, by lane entry."""

    def end(self) -> None:
        """Stop reading and publishing; idempotent."""


class RedisLaneSession:
    """Reads and publishes in Redis, in two threads with a connection each."""

    def __init__(
        self,
        settings: WorkerSettings,
        spec: ModelSpec,
        info: EngineInfo,
        worker: str,
        inbox: queue.SimpleQueue[InboxItem],
        *,
        stats: RunningStats | None = None,
        tracer: Tracer | None = None,
        results: RecentResults | None = None,
    ) -> None:
        """What is read goes into ``inbox``; ``results`` is shared by all sessions of an engine."""
        self.worker = worker
        self._settings = settings
        keys = Keys(settings.yard)
        self._stats = stats = stats or RunningStats()
        stats.begin(info.model)
        self._publisher = Publisher(
            Scripts(Yard(self._connect(), keys), reply_maxlen=settings.reply_maxlen),
            worker,
            info,
            on_stale=lambda entry, charged: inbox.put(Stale(worker, entry, charged)),
            on_lost=lambda: inbox.put(LeaseLost(worker)),
            stats=stats,
            spans=EngineSpans(tracer or Tracer("", ""), info, worker),
            results=results or RecentResults(),
        )
        self._reader = LaneReader(
            Yard(self._connect(), keys),
            worker,
            lambda assignments: inbox.put(Delivery(worker, assignments)),
            lambda entry, charged: inbox.put(Stale(worker, entry, charged)),
            settings.block_ms,
            sampling=spec.sampling,
        )

    @property
    def runs(self) -> dict[str, Run]:
        """See `LaneSession`."""
        return self._publisher.runs

    @property
    def epoch(self) -> int | None:
        """See `LaneSession`."""
        return self._publisher.epoch

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._publisher.epoch = epoch

    @property
    def broker_time(self) -> BrokerTime:
        """See `LaneSession`."""
        return self._reader.broker_time

    @property
    def attempts(self) -> int:
        """See `LaneSession`."""
        return self._publisher.attempts

    def start(self) -> None:
        """See `LaneSession`."""
        self._publisher.start()
        self._reader.start()

    def put(self, events: Sequence[Outcome]) -> None:
        """See `LaneSession`."""
        self._publisher.put(events)

    def settle(self, aborted: Aborted) -> None:
        """See `LaneSession`."""
        self._publisher.settle(aborted)

    def note_made(self, made: Mapping[str, int]) -> None:
        """See `LaneSession`."""
        self._stats.note_made((self.runs[key], made[key]) for key in made if key in self.runs)

    def end(self) -> None:
        """See `LaneSession`."""
        self._reader.stop()
        self._publisher.stop()

    def _connect(self) -> redis.Redis:
        """A connection without retries: reader and publisher retry and know when to give up."""
        timeout_s = self._settings.block_ms / 1000 + BLOCK_MARGIN_S
        return open_connection(self._settings.redis_url, timeout_s=timeout_s, retries=0)
