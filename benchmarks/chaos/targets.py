"""Whom a chaos run may hit: the worker processes that the roster names, told apart by host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenyard.protocol.worker_info import WorkerState, decode_worker

#: What `host_of` says of a process that is gone, or that none of our hosts has started.
NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker process that lives."""

    host: str  # name of its controller
    worker: str  # name with incarnation
    pid: int
    state: WorkerState


def find_workers(
    roster: Mapping[bytes, bytes], host_of: Callable[[int], str]
) -> list[WorkerProcess]:
    """The workers of a roster whose processes live, by name.

    ``host_of`` tells which controller has started a process, `NOBODY` where none of ours has:
    the roster keeps a dead worker until its lease has run out, and its pid may be another's.
    """
    found = []
    for worker, packed in sorted(roster.items()):
        try:
            info = decode_worker(packed)
        except msgspec.DecodeError:
            continue
        host = host_of(info.pid)
        if host != NOBODY:
            found.append(WorkerProcess(host, worker.decode(), info.pid, info.state))
    return found
