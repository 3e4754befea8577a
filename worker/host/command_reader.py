"""Reads the control stream: a thread that hands commands and signals to its controller."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenyard.protocol.commands import Command, parse_command
from tokenyard.protocol.control import Order, parse_order
from tokenyard.protocol.yard import Yard
from worker.process.stream_reader import StreamReader

log = logging.getLogger("tokenyard.worker.control")

#: Most entries of one read.
COUNT = 100


class CommandReader(StreamReader):
    """Calls ``take`` with the entry id of every command and signal of the stream.

    It reads the stream from its start: old commands are for workers that are gone, since names with
    incarnations never repeat, and skipping them could miss a command for a worker that joins before
    the first read. ``on_return`` is called after an outage: the server may have lost writes.
    """

    count = COUNT

    def __init__(
        self,
        yard: Yard,
        take: Callable[[str, Command | Order], None],
        on_return: Callable[[], None],
        block_ms: int,
    ) -> None:
        super().__init__(yard.connection, yard.keys.control, block_ms, "control")
        self._give = take
        self._on_return = on_return
        self._is_cut_off = False

    def run_once(self) -> None:
        """One bounded read."""
        super().run_once()
        if self._is_cut_off:
            self._is_cut_off = False
            self._on_return()

    def _on_outage(self) -> None:
        self._is_cut_off = True

    def _take(self, entry: str, fields: dict[bytes, bytes]) -> None:
        said = parse_order(fields) if b"signal" in fields else parse_command(fields)
        if said is None:
            log.error("entry %s of the control stream is neither a command nor a signal", entry)
        else:
            self._give(entry, said)
