"""Shared memory of a group that is freed with its last user, even if that process is killed.

A name in /dev/shm outlives a killed process, so names are removed once every rank has opened the
memory.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

_FOLDER = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory is on Linux


def unname(queue: MessageQueue) -> None:
    """Remove the name of a queue's memory; only its creator may, once all readers have it."""
    ring = queue.buffer
    if ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # else the queue unlinks the name again when it is deleted


class Segments:
    """The shared memory of reductions in vLLM's CPU backend.

    vLLM keeps it mapped until the process ends, group after group. Freeing its pages makes such a
    mapping cost nothing.
    """

    def __init__(self, marked: str) -> None:
        """Open and unname all segments whose name contains ``marked``; on a GPU there are none."""
        self._maps: list[mmap.mmap] = []
        for path in _FOLDER.glob(f"*{marked}*"):
            with path.open("r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0))
            path.unlink()

    def free(self) -> None:
        """Free the pages; no rank may use them afterwards; idempotent."""
        for segment in self._maps:
            segment.madvise(mmap.MADV_REMOVE)
            segment.close()
        self._maps.clear()
