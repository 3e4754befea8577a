"""What the engines of a benchmark compute on, and how much memory of it is taken."""

from __future__ import annotations

import time
from functools import cache
from typing import Final

from benchmarks.cold_start.case import MODELS
from benchmarks.machine import ask_gpus
from tokenyard.protocol.settings import WorkerSettings
from worker.engines.devices import find_device

#: A process that has ended gives its GPU memory back within so long.
_FREED_S: Final = 60.0
#: A driver's own use goes up and down by less.
_NOISE_MIB: Final = 1024.0
_POLL_S: Final = 0.5


@cache
def on_gpu() -> bool:
    """Whether vLLM's engines here use a GPU; asked of vLLM and torch as workers ask."""
    return find_device(WorkerSettings(redis_url="", models=MODELS)).name == "cuda"


def used_mib() -> float:
    """GPU memory that is taken on the fullest GPU, in MiB; 0 where there is none."""
    told = (line.strip() for line in ask_gpus("memory.used"))  # "[N/A]" where nobody counts
    return max((float(line) for line in told if line.isdecimal()), default=0.0)


def wait_until_free(before_mib: float) -> None:
    """Wait until no more is taken than ``before_mib``: engines that have ended give theirs back.

    Raises `TimeoutError` where they do not, since the next engine would not find room.
    """
    until = time.monotonic() + _FREED_S
    while (used := used_mib()) > before_mib + _NOISE_MIB:
        if time.monotonic() > until:
            raise TimeoutError(f"{used:,.0f} MiB of the GPU are taken, {before_mib:,.0f} before")
        time.sleep(_POLL_S)
