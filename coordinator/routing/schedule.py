"""A record of decisions that can be replayed and compared.

One JSON object a line, with the worker by name (incarnations differ between runs). Most lines
assign a request to a worker; those with ``place`` command a worker to load a model. The two are
numbered separately: the order of requests is reproducible, the moment of a load is not. A replay
follows the requests only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from tokenyard.protocol.commands import Command


class Decision(Struct, frozen=True, omit_defaults=True):
    """One assignment."""

    n: int
    client: str
    id: str
    worker: str
    instead_of: str = ""  # the worker that the replayed schedule named


class Placing(Struct, frozen=True, omit_defaults=True):
    """One command to load a model."""

    n: int
    place: str  # the verb
    worker: str
    model: str
    why: str
    devices: list[int] = msgspec.field(default_factory=list)  # of a group


class _Kind(Struct, frozen=True):
    """The field that distinguishes the two kinds of lines."""

    place: str | None = None


class ScheduleWriter:
    """Appends decisions to a file, each flushed immediately."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._decisions = itertools.count()
        self._placings = itertools.count()

    def write(self, client: str, request_id: str, worker: str, instead_of: str = "") -> None:
        """Record one assignment, in the order of dispatch."""
        decision = Decision(next(self._decisions), client, request_id, worker, instead_of)
        self._append(decision)

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


def read_schedule(path: Path) -> Iterator[Decision]:
    """The assignments, in order."""
    decoder = msgspec.json.Decoder(Decision)
    for line, kind in _lines(path):
        if kind.place is None:
            yield decoder.decode(line)


def read_placings(path: Path) -> Iterator[Placing]:
    """The commands to load models, in order."""
    decoder = msgspec.json.Decoder(Placing)
    for line, kind in _lines(path):
        if kind.place is not None:
            yield decoder.decode(line)


def _lines(path: Path) -> Iterator[tuple[bytes, _Kind]]:
    decoder = msgspec.json.Decoder(_Kind)
    with path.open("rb") as lines:
        for line in lines:
            yield line, decoder.decode(line)


class Replay:
    """The worker of each attempt of each request in a recorded schedule."""

    def __init__(self, decisions: Iterator[Decision]) -> None:
        self._workers: dict[tuple[str, str], list[str]] = {}
        for decision in decisions:
            self._workers.setdefault((decision.client, decision.id), []).append(decision.worker)

    def worker(self, client: str, request_id: str) -> str | None:
        """Name of the worker for the next attempt of a request."""
        workers = self._workers.get((client, request_id))
        return workers[0] if workers else None

    def advance(self, client: str, request_id: str) -> None:
        """The request was dispatched: its next attempt has a record of its own."""
        workers = self._workers.get((client, request_id))
        if workers and len(workers) > 1:
            del workers[0]


def first_difference(ours: Path, theirs: Path) -> str | None:
    """The first difference of two schedules, in words; None where they are the same."""
    left, right = list(read_schedule(ours)), list(read_schedule(theirs))
    for a, b in zip(left, right, strict=False):
        if a != b:
            return (
                f"decision {a.n}: {a.client}/{a.id} to {a.worker}, {b.client}/{b.id} to {b.worker}"
            )
    if len(left) != len(right):
        return f"{len(left)} decisions here, {len(right)} there"
    return None
