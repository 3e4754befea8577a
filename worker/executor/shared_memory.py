"""Shared memory of a group that is gone when its last user is, however that one ends.

A name in /dev/shm outlives a process that is killed. So the names are taken away as soon as every
rank has the memory open.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

_FOLDER = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory is on Linux


def unname(queue: MessageQueue) -> None:
    """Take the name of a queue's memory away; only its maker may, once all readers are there."""
    ring = queue.buffer
    if ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # else it would look for the name when it goes


class Segments:
    """The memory over which vLLM's CPU backend reduces.

    vLLM keeps it mapped until the process ends, group after group. Without its pages a mapping
    costs nothing, so they are given back here.
    """

    def __init__(self, marked: str) -> None:
        """Open and unname all segments whose name contains this; on a GPU there are none."""
        self._maps: list[mmap.mmap] = []
        for path in _FOLDER.glob(f"*{marked}*"):
            with path.open("r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0))
            path.unlink()

    def free(self) -> None:
        """Give the pages back; idempotent. No rank may use them any more."""
        for segment in self._maps:
            segment.madvise(mmap.MADV_REMOVE)
            segment.close()
        self._maps.clear()
