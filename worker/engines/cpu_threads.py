"""Which cores an engine on a CPU computes on, chosen when everything has been imported.

Not by environment variables: OpenMP reads ``OMP_NUM_THREADS`` once, when torch is loaded, and a
process that was forked from one that has loaded it would be too late. That variable is 1 during the
imports (`worker.engines.vllm.environment`), so that none starts threads, which a fork would lose.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch


def use_cores(cores: Sequence[int], threads: int = 0) -> None:
    """Compute with a thread on each of these cores, or with so many ``threads``.

    OpenMP's threads spin while they wait for each other: two teams on the same cores are ten times
    slower than one. So a team is bound to its cores. A single thread waits for nobody and is left
    to the kernel, which knows what else runs on this host.
    """
    threads = threads or len(cores)
    if threads > 1 and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():  # 0 would be this thread alone
            os.sched_setaffinity(int(thread.name), cores)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # vLLM looks here for what it may use
    torch.set_num_threads(threads)
