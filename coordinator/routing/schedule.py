"""A record of who was given what, that can be replayed and compared.

One JSON object a line, the worker by name (incarnations differ between runs). Most say which worker
was given a request; those with ``place`` say which was told to hold which model, and why. The two
are numbered apart: when models are placed is a matter of time, and the order of requests is not.
A replay follows the requests alone.
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
    instead_of: str = ""  # the worker that the schedule which was followed had named


class Placing(Struct, frozen=True, omit_defaults=True):
    """One command of the placement."""

    n: int
    place: str  # the verb
    worker: str
    model: str
    why: str
    devices: list[int] = msgspec.field(default_factory=list)  # of a group


class _Kind(Struct, frozen=True):
    """What tells the lines apart."""

    place: str | None = None


class ScheduleWriter:
    """Appends decisions to a file, each flushed at once."""

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
        """Record that a worker, given by name, was commanded to hold a model."""
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
    """Who was given which request, in order."""
    decoder = msgspec.json.Decoder(Decision)
    for line, kind in _lines(path):
        if kind.place is None:
            yield decoder.decode(line)


def read_placings(path: Path) -> Iterator[Placing]:
    """Who was told to hold which model, in order."""
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
    """A recorded schedule as a look-up: which worker a request went to, attempt by attempt."""

    def __init__(self, decisions: Iterator[Decision]) -> None:
        self._workers: dict[tuple[str, str], list[str]] = {}
        for decision in decisions:
            self._workers.setdefault((decision.client, decision.id), []).append(decision.worker)

    def worker(self, client: str, request_id: str) -> str | None:
        """Name of the worker whose turn it is for this request."""
        workers = self._workers.get((client, request_id))
        return workers[0] if workers else None

    def advance(self, client: str, request_id: str) -> None:
        """The request was given away: its next attempt has its own record."""
        workers = self._workers.get((client, request_id))
        if workers and len(workers) > 1:
            del workers[0]


def first_difference(ours: Path, theirs: Path) -> str | None:
    """Where two schedules part, in words; None where they are the same."""
    left, right = list(read_schedule(ours)), list(read_schedule(theirs))
    for a, b in zip(left, right, strict=False):
        if a != b:
            return (
                f"decision {a.n}: {a.client}/{a.id} to {a.worker}, {b.client}/{b.id} to {b.worker}"
            )
    if len(left) != len(right):
        return f"{len(left)} decisions here, {len(right)} there"
    return None
