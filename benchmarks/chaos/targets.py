"""The targets of a chaos run: the worker processes in the roster, by host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenyard.protocol.worker_info import WorkerState, decode_worker

#: The host of a process that is gone, or that no host of the run started.
NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A live worker process."""

    host: str  # name of its controller
    worker: str  # name with incarnation
    pid: int
    core: int  # pid of the process that has the device; 0: none of its own
    state: WorkerState


def find_workers(
    roster: Mapping[bytes, bytes], host_of: Callable[[int], str]
) -> list[WorkerProcess]:
    """The workers of a roster with live processes, sorted by name.

    ``host_of`` returns the controller that started a process, or `NOBODY`: the roster keeps a dead
    worker until its lease expires, and another process may have its pid by then.
    """
    found = []
    for worker, packed in sorted(roster.items()):
        try:
            info = decode_worker(packed)
        except msgspec.DecodeError:
            continue
        host = host_of(info.pid)
        if host != NOBODY:
            found.append(WorkerProcess(host, worker.decode(), info.pid, info.core_pid, info.state))
    return found
