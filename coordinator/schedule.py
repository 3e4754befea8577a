"""A record of who was given what, that can be replayed and compared.

One JSON object a line: the number of the decision, the request, its attempt's number among the
decisions for it, and the worker by name (incarnations differ between runs).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct


class Decision(Struct, frozen=True):
    """One assignment."""

    n: int
    client: str
    id: str
    worker: str


class ScheduleWriter:
    """Appends decisions to a file, each flushed at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._n = 0

    def write(self, client: str, request_id: str, worker: str) -> None:
        """Record one assignment, in the order of dispatch."""
        if self._file is None:
            self._file = self._path.open("wb")
        line = msgspec.json.encode(Decision(self._n, client, request_id, worker))
        self._file.write(line + b"\n")
        self._file.flush()
        self._n += 1

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file:
            self._file.close()
            self._file = None


def read_schedule(path: Path) -> Iterator[Decision]:
    """The decisions of a recorded schedule, in order."""
    decoder = msgspec.json.Decoder(Decision)
    with path.open("rb") as lines:
        for line in lines:
            yield decoder.decode(line)


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
