"""Reads one lane: a thread that parses its entries as assignments."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import redis

from tokenyard import clock
from tokenyard.clock import BrokerTime
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.wire import Assignment
from tokenyard.protocol.yard import Yard
from worker.process.stream_reader import StreamReader

log = logging.getLogger("tokenyard.worker.reader")

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
        self._capacity = yard.keys.capacity
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
        self._batch.append(assignment)
        if len(self._batch) >= _TOGETHER:
            self._hand_over()

    def _remove(self, entry: str) -> None:
        """Delete an entry that is no request, and free its place on the lane."""
        self._connection.xdel(self._stream, entry)
        capacity: dict[Any, Any] = {"event": "capacity", "worker": self._worker, "count": 1}
        # A server that is out of memory refuses; the coordinator recounts every second.
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            self._connection.xadd(self._capacity, capacity, maxlen=1000, approximate=True)
