"""One incarnation's time in office, as the yard knows it: a lane, and the right to publish."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import redis

from tokenyard.broker.connection import BLOCK_MARGIN_S, open_connection
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.scripts import Scripts
from tokenyard.telemetry.tracing import Tracer
from worker.engines import EngineInfo
from worker.models import ModelSpec
from worker.process.ended import Ended
from worker.process.loop import Delivery, EngineLoop, LeaseLost, Stale
from worker.process.outcomes import Outcome, Run
from worker.process.publisher import Publisher
from worker.process.reader import LaneReader
from worker.process.spans import EngineSpans
from worker.process.stats import RunningStats

log = logging.getLogger("tokenyard.worker.term")


class YardTerm:
    """A reader and a publisher, each a thread with a connection of its own."""

    def __init__(
        self, worker: str, reader: LaneReader, publisher: Publisher, clock_ms: float = 0.0
    ) -> None:
        self.worker = worker
        self.clock_ms = clock_ms  # the server's clock less ours
        self._reader = reader
        self._publisher = publisher

    @property
    def runs(self) -> dict[str, Run]:
        """What has been taken and is not answered yet, by lane entry."""
        return self._publisher.runs

    @property
    def epoch(self) -> int | None:
        """The generation epoch in which the events are made that come now."""
        return self._publisher.epoch

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._publisher.epoch = epoch

    @property
    def attempts(self) -> int:
        """Calls made to the server."""
        return self._publisher.attempts

    def start(self) -> None:
        """Begin reading and publishing."""
        self._publisher.start()
        self._reader.start()

    def put(self, events: Sequence[Outcome]) -> None:
        """Publish the events of one step; waits while too many wait already."""
        self._publisher.put(events)

    def end(self) -> None:
        """Let go of the lane; idempotent."""
        self._reader.stop()
        self._publisher.stop()


class YardTerms:
    """Makes the terms of one engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        spec: ModelSpec,
        info: EngineInfo,
        tally: RunningStats | None = None,
        tracer: Tracer | None = None,
        ended: Ended | None = None,
    ) -> None:
        self._settings = settings
        self._keys = Keys(settings.yard)
        self._spec = spec
        self._info = info
        self._tally = tally or RunningStats()
        self._tracer = tracer or Tracer("", "")
        self._ended = ended or Ended()

    def __call__(self, worker: str, loop: EngineLoop) -> YardTerm:
        """The term of ``worker``, not started."""
        settings, inbox = self._settings, loop.inbox
        self._tally.begin(self._info.model)
        scripts = Scripts(self._connect(), self._keys, reply_maxlen=settings.reply_maxlen)
        publisher = Publisher(
            scripts,
            worker,
            self._info,
            on_stale=lambda entry: inbox.put(Stale(worker, entry)),
            on_lost=lambda: inbox.put(LeaseLost(worker)),
            tally=self._tally,
            spans=EngineSpans(self._tracer, self._info, worker),
            ended=self._ended,
        )
        reader = LaneReader(
            self._connect(),
            self._keys,
            worker,
            lambda assignments: inbox.put(Delivery(worker, assignments)),
            lambda entry: inbox.put(Stale(worker, entry)),
            settings.block_ms,
            sampling=self._spec.sampling,
        )
        return YardTerm(worker, reader, publisher, self._clock_ms())

    def _clock_ms(self) -> float:
        """How far the server's clock, which deadlines go by, is ahead of ours."""
        try:
            with self._connect() as connection:
                now: tuple[int, int] = connection.time()
        except redis.RedisError as fault:
            log.warning("the server's clock is not known, ours is taken: %s", fault)
            return 0.0
        return now[0] * 1000 + now[1] / 1000 - time.time() * 1000

    def _connect(self) -> redis.Redis:
        """The callers try again themselves: they know when to give up."""
        timeout_s = self._settings.block_ms / 1000 + BLOCK_MARGIN_S
        return open_connection(self._settings.redis_url, timeout_s=timeout_s, retries=0)
