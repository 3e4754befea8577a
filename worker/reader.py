"""Reads one lane: a thread that turns its entries into assignments."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff

from tokenyard.keys import Keys
from tokenyard.parse import parse_assignment
from tokenyard.wire import Assignment

log = logging.getLogger("tokenyard.worker.reader")

COUNT = 256


class LaneReader:
    """Hands each assignment on a lane to ``deliver``, once, in order.

    ``cancel`` is given the entries of those that were cancelled since. ``sampling`` holds the
    parameters that the model takes where a request says nothing.

    The lane belongs to one incarnation, so a plain read behind the last entry seen is enough;
    the entries stay until their results are published.
    """

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        worker: str,
        deliver: Callable[[Assignment], None],
        cancel: Callable[[str], None],
        block_ms: int,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._lane = keys.lane(worker)
        self._events = keys.events
        self._worker = worker
        self._deliver = deliver
        self._cancel = cancel
        self._block_ms = block_ms
        self._sampling = sampling or {}
        self._last = "0"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader-{worker}", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more; does not wait for a blocked read, whose entries are not delivered."""
        self._stop.set()

    def _run(self) -> None:
        backoff, failures = ExponentialWithJitterBackoff(cap=2.0, base=0.05), 0
        while not self._stop.is_set():
            try:
                self.run_once()
                failures = 0
            except redis.RedisError as fault:
                failures += 1
                log.warning("reading %s: %s", self._lane, fault)
                self._stop.wait(backoff.compute(failures))

    def run_once(self) -> None:
        """One bounded read."""
        answer: Any = self._connection.xread(
            {self._lane: self._last}, count=COUNT, block=self._block_ms
        )
        for _, entries in answer or ():
            for entry, fields in entries:
                if self._stop.is_set():
                    return
                self._take(entry.decode(), fields)
                self._last = entry.decode()

    def _take(self, entry: str, fields: dict[bytes, bytes]) -> None:
        cancelled = fields.get(b"cancel")
        # A request may carry a field of that name, too: whatever was dispatched has its attempt.
        if cancelled is not None and b"attempt" not in fields:
            self._cancel(cancelled.decode(errors="replace"))
            self._remove(entry)
            return
        assignment = parse_assignment(entry, fields, self._sampling)
        if assignment is None:
            log.error("entry %s of %s is no assignment; removed", entry, self._lane)
            self._remove(entry)
            return
        self._deliver(assignment)

    def _remove(self, entry: str) -> None:
        """Take an entry off the lane that stands for no request, and give its place free."""
        self._connection.xdel(self._lane, entry)
        freed: dict[Any, Any] = {"event": "freed", "worker": self._worker, "count": 1}
        # A server without memory refuses this; the coordinator counts again once a second.
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            self._connection.xadd(self._events, freed, maxlen=1000, approximate=True)
