"""The device of a benchmark's engines, and its used memory."""

from __future__ import annotations

import time
from functools import cache
from typing import Final

from benchmarks.cold_start.case import MODELS
from benchmarks.machine import ask_gpus
from tokenyard.protocol.settings import WorkerSettings
from worker.engines.devices import find_device

#: Seconds within which a process that has ended frees its GPU memory.
_FREED_S: Final = 60.0
#: A driver's own use varies by less than this.
_NOISE_MIB: Final = 1024.0
_POLL_S: Final = 0.5


@cache
def on_gpu() -> bool:
    """Whether vLLM's engines use a GPU here, determined from vLLM and torch as workers do."""
    return find_device(WorkerSettings(redis_url="", models=MODELS)).name == "cuda"


def used_mib() -> float:
    """Used memory of the fullest GPU, in MiB; 0 without a GPU."""
    told = (line.strip() for line in ask_gpus("memory.used"))  # "[N/A]" if unsupported
    return max((float(line) for line in told if line.isdecimal()), default=0.0)


def wait_until_free(before_mib: float) -> None:
    """Wait until engines that have ended free their memory, down to ``before_mib``.

    Raises `TimeoutError` if they do not: the next engine would not fit.
    """
    until = time.monotonic() + _FREED_S
    while (used := used_mib()) > before_mib + _NOISE_MIB:
        if time.monotonic() > until:
            raise TimeoutError(f"{used:,.0f} MiB of the GPU are taken, {before_mib:,.0f} before")
        time.sleep(_POLL_S)
