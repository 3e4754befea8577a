"""A record of decisions that can be compared.

One JSON object a line, with the worker by name (incarnations differ between runs). Most lines
assign a request to a worker; those with ``place`` command a worker to load a model. The two are
numbered separately: the order of requests is reproducible, the moment of a load is not.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from tokenyard.protocol.control import Command


class Decision(Struct, frozen=True, omit_defaults=True):
    """One assignment."""

    n: int
    client: str
    id: str
    worker: str


class Placing(Struct, frozen=True, omit_defaults=True):
    """One command to load a model."""

    n: int
    place: str  # the verb
    worker: str
    model: str
    why: str
    devices: list[int] = msgspec.field(default_factory=list)  # of a group


class ScheduleWriter:
    """Appends decisions to a file, each flushed immediately."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._decisions = itertools.count()
        self._placings = itertools.count()

    def write(self, client: str, request_id: str, worker: str) -> None:
        """Record one assignment, in the order of dispatch."""
        self._append(Decision(next(self._decisions), client, request_id, worker))

    def write_placing(self, command: Command, worker: str) -> None:
        """Record the command to a worker, given by name, to load a model."""
        n, devices = next(self._placings), command.devices
        self._append(Placing(n, command.verb, worker, command.model, command.why, devices))

    def _append(self, line: Decision | Placing) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file:
            self._file.close()
            self._file = None
