"""Sets the cores and the number of threads of an engine on a CPU, after all imports.

Environment variables cannot do that: OpenMP reads ``OMP_NUM_THREADS`` once, when the
fork-server loads torch, and worker processes are forked later. The variable is 1 during the imports
(`worker.engines.vllm.environment`), so that they start no threads, which a fork would lose.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch


def use_cores(cores: Sequence[int], threads: int = 0) -> None:
    """Compute with one thread per core, or with ``threads`` threads on ``cores``.

    OpenMP's threads spin while they wait for each other: two teams on the same cores are ten times
    slower than one. So a team is bound to its cores. A single thread is not bound: the kernel
    knows the load of the other cores.
    """
    threads = threads or len(cores)
    if threads > 1 and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():  # pid 0 would bind only this thread
            os.sched_setaffinity(int(thread.name), cores)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # vLLM reads it too
    torch.set_num_threads(threads)
