"""A thread that reads a stream from the last entry on and survives outages."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any, Final

import redis

from tokenyard import clock
from tokenyard.broker.outage import Outage

log = logging.getLogger("tokenyard.worker.reader")


#: Most entries of one read.
COUNT: Final = 256


class StreamReader(ABC):
    """Takes each entry of a stream once, in order; it owns the connection."""

    def __init__(self, connection: redis.Redis, stream: str, block_ms: int, thread: str) -> None:
        self._connection = connection
        self._stream = stream
        self._block_ms = block_ms
        self._last = "0"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; idempotent. The result of a read in progress is ignored."""
        self._stop.set()

    def _run(self) -> None:
        outage = Outage(log, f"reading {self._stream}")
        while not self._stop.is_set():
            try:
                self.run_once()
                outage.over()
            except redis.RedisError as error:
                self._on_outage()
                clock.wait(self._stop, outage.note(error))
        self._connection.close()

    def run_once(self) -> None:
        """One bounded read."""
        answer: Any = self._connection.xread(
            {self._stream: self._last}, count=COUNT, block=self._block_ms
        )
        for _, entries in answer or ():
            for entry, fields in entries:
                if self._stop.is_set():
                    return
                name = entry.decode()
                self._take(name, fields)
                self._last = name

    @abstractmethod
    def _on_outage(self) -> None:
        """Note that a read has failed."""

    @abstractmethod
    def _take(self, entry: str, fields: dict[bytes, bytes]) -> None:
        """Handle an entry; it comes again if this raises."""
