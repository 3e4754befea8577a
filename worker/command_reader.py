"""Reads the control stream: a thread that hands each command to its controller."""

from __future__ import annotations

import logging
from collections.abc import Callable

import redis

from tokenyard.commands import Command, parse_command
from tokenyard.keys import Keys
from worker.stream_reader import StreamReader

log = logging.getLogger("tokenyard.worker.control")

#: Most commands of one read.
COUNT = 100


class CommandReader(StreamReader):
    """Gives every command of the stream to ``take``, with its entry id.

    Also the old ones, which are for workers that are no more: no two ever have the same name and
    incarnation. To skip them would be to miss what is said to a worker that joins before the
    first read.
    """

    count = COUNT

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        take: Callable[[str, Command], None],
        block_ms: int,
    ) -> None:
        super().__init__(connection, keys.control, block_ms, "control")
        self._give = take

    def _take(self, entry: str, fields: dict[bytes, bytes]) -> None:
        command = parse_command(fields)
        if command is None:
            log.error("entry %s of the control stream is no command", entry)
        else:
            self._give(entry, command)
