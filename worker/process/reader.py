"""Reads one lane: a thread that turns its entries into assignments."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import redis

from tokenyard.protocol.keys import Keys
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.wire import Assignment
from worker.process.stream_reader import StreamReader

log = logging.getLogger("tokenyard.worker.reader")

#: Assignments that are handed over together, at most: the engine begins with the first of a long
#: read while the rest is parsed.
_TOGETHER: Final = 32


class LaneReader(StreamReader):
    """Hands each assignment on a lane to ``deliver``, in order; many of a read together.

    ``cancel`` is given the entries of those that were cancelled since. ``sampling`` holds the
    parameters that the model takes where a request says nothing.

    The lane belongs to one incarnation, so a plain read behind the last entry seen is enough;
    the entries stay until their results are published. Each comes once, and once more after an
    outage.
    """

    reads_anew = True

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        worker: str,
        deliver: Callable[[Sequence[Assignment]], None],
        cancel: Callable[[str], None],
        block_ms: int,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(connection, keys.lane(worker), block_ms, f"reader-{worker}")
        self._capacity = keys.capacity
        self._worker = worker
        self._deliver = deliver
        self._cancel = cancel
        self._sampling = sampling or {}
        self._found: list[Assignment] = []

    def run_once(self) -> None:
        """One bounded read."""
        try:
            super().run_once()
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """One by one they would wake the engine's thread again and again while this one reads."""
        if self._found:
            found, self._found = self._found, []
            self._deliver(found)

    def _take(self, entry: str, fields: dict[bytes, bytes]) -> None:
        cancelled = fields.get(b"cancel")
        # A request may carry a field of that name, too: whatever was dispatched has its attempt.
        if cancelled is not None and b"attempt" not in fields:
            self._hand_over()
            self._cancel(cancelled.decode(errors="replace"))
            self._remove(entry)
            return
        assignment = parse_assignment(entry, fields, self._sampling)
        if assignment is None:
            log.error("entry %s of %s is no assignment; removed", entry, self._stream)
            self._remove(entry)
            return
        self._found.append(assignment)
        if len(self._found) >= _TOGETHER:
            self._hand_over()

    def _remove(self, entry: str) -> None:
        """Take an entry off the lane that stands for no request, and give its place free."""
        self._connection.xdel(self._stream, entry)
        capacity: dict[Any, Any] = {"event": "capacity", "worker": self._worker, "count": 1}
        # A server without memory refuses this; the coordinator counts again once a second.
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            self._connection.xadd(self._capacity, capacity, maxlen=1000, approximate=True)
