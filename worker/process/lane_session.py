"""A lane session: the time in which a process serves the lane of one incarnation of a worker."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import redis
from msgspec.structs import replace

from tokenyard import clock
from tokenyard.broker.connection import BLOCK_MARGIN_S, open_connection
from tokenyard.clock import BrokerTime
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.media import check_media, decode_media, media_names
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts import Scripts
from tokenyard.telemetry.tracing import Tracer
from worker.engines import EngineInfo, TokenDelta
from worker.messages import LOCAL, AbortRequests, Delivery, LeaseLost, Replies, ToProcess
from worker.models import ModelSpec
from worker.process.outcomes import Aborted, Outcome, Run, delta_reply, merge, result_reply
from worker.process.publisher import Publisher
from worker.process.recent_results import RecentResults
from worker.process.stats import RunningStats
from worker.process.stream_reader import StreamReader

log = logging.getLogger("tokenyard.worker.reader")


class RedisLaneSession:
    """Reads and publishes in Redis, in two threads with a connection each.

    ``worker`` is the incarnation, ``broker_time`` the clock that deadlines refer to, and ``runs``
    has the requests that were taken and are unanswered, by lane entry.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        spec: ModelSpec,
        info: EngineInfo,
        worker: str,
        inbox: queue.SimpleQueue[ToProcess],
        *,
        stats: RunningStats,
        tracer: Tracer,
        results: RecentResults,
    ) -> None:
        """What is read goes into ``inbox``; ``results`` is shared by all sessions of an engine."""
        self.worker = worker
        self._settings = settings
        keys = Keys(settings.yard)
        self._stats = stats
        stats.begin(info.model)

        def give_up(entry: str, charged: str) -> None:
            inbox.put(AbortRequests(worker, [entry], charged))

        self._publisher = Publisher(
            Scripts(Yard(self._connect(), keys), reply_maxlen=settings.reply_maxlen),
            worker,
            info,
            on_stale=give_up,
            on_lost=lambda: inbox.put(LeaseLost(worker)),
            stats=stats,
            tracer=tracer,
            results=results,
            stream_interval_ms=settings.stream_interval_ms,
        )
        self.runs = self._publisher.runs
        self._reader = LaneReader(
            Yard(self._connect(), keys),
            worker,
            lambda assignments: inbox.put(Delivery(worker, assignments)),
            give_up,
            settings.block_ms,
            spec.sampling,
        )
        self.broker_time = self._reader.broker_time

    @property
    def attempts(self) -> int:
        """Tries to publish: a sign of life while the server is away."""
        return self._publisher.attempts

    def start(self) -> None:
        """Begin reading and publishing."""
        self._publisher.start()
        self._reader.start()

    def put(self, events: Sequence[Outcome], epoch: int | None = None) -> None:
        """Publish the events of one step, made in this generation epoch.

        Blocks while too many steps wait.
        """
        self._publisher.put(events, epoch)

    def settle(self, aborted: Aborted) -> None:
        """Let the tenant of a cancelled request pay what was generated."""
        self._publisher.settle(aborted)

    def note_made(self, made: Mapping[str, int]) -> None:
        """Count the tokens made so far of unfinished requests, by lane entry."""
        self._stats.note_made((self.runs[key], made[key]) for key in made if key in self.runs)

    def end(self) -> None:
        """Stop reading and publishing; idempotent."""
        self._reader.stop()
        self._publisher.stop()

    def _connect(self) -> redis.Redis:
        """A connection without retries: reader and publisher retry and know when to give up."""
        timeout_s = self._settings.block_ms / 1000 + BLOCK_MARGIN_S
        return open_connection(self._settings.redis_url, timeout_s=timeout_s, retries=0)


class PipeLaneSession:
    """Requests and replies travel over the controller's pipe, which the main loop reads."""

    worker = LOCAL
    attempts = 0

    def __init__(self, info: EngineInfo, send: Callable[[Replies], None]) -> None:
        self.broker_time = BrokerTime()  # no broker: this machine's
        self.runs: dict[str, Run] = {}
        self._info = info
        self._send = send

    def start(self) -> None:
        """There is no thread to start."""

    def put(self, events: Sequence[Outcome], epoch: int | None = None) -> None:
        """Send the replies of one step."""
        now = clock.monotonic()
        replies = []
        for event in merge(events):
            run = self.runs.get(event.key)
            if run is None:
                continue
            if isinstance(event, TokenDelta):
                run.first_token = run.first_token or now
                replies.append((event.key, delta_reply(run, event)))
            else:
                del self.runs[event.key]
                reply = result_reply(run, event, self._info, LOCAL, now, epoch)
                replies.append((event.key, reply))
        if replies:
            self._send(Replies(replies))

    def settle(self, aborted: Aborted) -> None:
        """Nobody pays here."""

    def note_made(self, made: Mapping[str, int]) -> None:
        """Nobody counts here."""

    def end(self) -> None:
        """Drop unanswered requests."""
        self.runs.clear()


#: Where the assignments of one incarnation come from, and its right to publish.
LaneSession = RedisLaneSession | PipeLaneSession


# Reads one lane: a thread that parses its entries as assignments.


#: Most assignments in one delivery: the engine begins with the first of a long read while the
#: rest is parsed.
_TOGETHER: Final = 32


class LaneReader(StreamReader):
    """Calls ``deliver`` with the assignments of a lane, in order and in batches.

    ``cancel`` is called with the entry of each cancelled request, and `Aborted.charged`.
    ``sampling`` has the model's defaults for parameters that a request leaves out.

    The lane belongs to one incarnation, so a plain read after the last entry is enough. Entries
    stay until their results are published; after an outage they are delivered again.
    """

    def __init__(
        self,
        yard: Yard,
        worker: str,
        deliver: Callable[[Sequence[Assignment]], None],
        cancel: Callable[[str, str], None],
        block_ms: int,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(yard.connection, yard.keys.lane(worker), block_ms, f"reader-{worker}")
        self.broker_time = BrokerTime()
        self._keys = yard.keys
        self._worker = worker
        self._deliver = deliver
        self._cancel = cancel
        self._sampling = sampling or {}
        self._batch: list[Assignment] = []

    def run_once(self) -> None:
        """One bounded read."""
        try:
            self._measure_time()
            super().run_once()
        finally:
            self._hand_over()

    def _measure_time(self) -> None:
        """Before the first read, after an outage, and now and then."""
        if self.broker_time.is_due:
            asked_at = clock.monotonic()
            told: Any = self._connection.time()
            self.broker_time.measured(told, asked_at)

    def _on_outage(self) -> None:
        # A server that comes back without its last writes may have entries again that were taken.
        self._last = "0"
        self.broker_time.expire()

    def _hand_over(self) -> None:
        """In batches: single ones would wake the engine's thread too often while this one reads."""
        if self._batch:
            found, self._batch = self._batch, []
            self._deliver(found)

    def _take(self, entry: str, fields: dict[bytes, bytes]) -> None:
        cancelled = fields.get(b"cancel")
        # A request may have a field of that name too, but a dispatched one has an attempt.
        if cancelled is not None and b"attempt" not in fields:
            self._hand_over()
            charged = fields.get(b"request", b"").decode(errors="replace")
            self._cancel(cancelled.decode(errors="replace"), charged)
            self._remove(entry)
            return
        assignment = parse_assignment(entry, fields, self._sampling)
        if assignment is None:
            log.error("entry %s of %s is no assignment; removed", entry, self._stream)
            self._remove(entry)
            return
        request = assignment.request
        if not assignment.fault and (request.messages or request.media):
            assignment = self._with_media(assignment)
        self._batch.append(assignment)
        if len(self._batch) >= _TOGETHER:
            self._hand_over()

    def _with_media(self, assignment: Assignment) -> Assignment:
        """The same with what its messages name, if anything."""
        request = assignment.request
        names = {*media_names(request.messages or ()), *chain(*request.media.values())}
        if not names:
            return assignment
        raw: Any = self._connection.get(self._keys.media(request.client, request.id))
        try:
            media = decode_media(raw) if raw is not None else {}
            check_media(media, names)
        except InvalidRequest as error:
            return replace(assignment, fault=str(error))
        return replace(assignment, media=media)

    def _remove(self, entry: str) -> None:
        """Delete an entry that is no request, and free its place on the lane."""
        self._connection.xdel(self._stream, entry)
        capacity: dict[Any, Any] = {"event": "capacity", "worker": self._worker, "count": 1}
        # A server that is out of memory refuses; the coordinator recounts every second.
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            self._connection.xadd(self._keys.capacity, capacity, maxlen=1000, approximate=True)
