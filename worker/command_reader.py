"""Reads the control stream: a thread that hands each command to its controller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff

from tokenyard.commands import Command, parse_command
from tokenyard.keys import Keys

log = logging.getLogger("tokenyard.worker.control")

COUNT = 100


class CommandReader:
    """Gives every command of the stream to ``take``, with its entry id.

    Also the old ones, which are for workers that are no more: no two ever have the same name and
    incarnation. To skip them would be to miss what is said to a worker that joins before the
    first read.
    """

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        take: Callable[[str, Command], None],
        block_ms: int,
    ) -> None:
        self._connection = connection
        self._stream = keys.control
        self._take = take
        self._block_ms = block_ms
        self._last = "0"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more, at the latest when the read that is under way ends; idempotent."""
        self._stop.set()

    def _run(self) -> None:
        backoff, failures = ExponentialWithJitterBackoff(cap=2.0, base=0.05), 0
        while not self._stop.is_set():
            try:
                self.run_once()
                failures = 0
            except redis.RedisError as fault:
                failures += 1
                log.warning("reading commands: %s", fault)
                self._stop.wait(backoff.compute(failures))
        self._connection.close()

    def run_once(self) -> None:
        """One bounded read."""
        answer: Any = self._connection.xread(
            {self._stream: self._last}, count=COUNT, block=self._block_ms
        )
        for _, entries in answer or ():
            for entry, fields in entries:
                self._last = entry.decode()
                command = parse_command(fields)
                if command is None:
                    log.error("entry %s of the control stream is no command", self._last)
                else:
                    self._take(self._last, command)
