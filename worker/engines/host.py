"""What all worker processes of a host share: the environment, and modules that are imported once."""

from __future__ import annotations

import os

from tokenyard.settings import WorkerSettings
from worker.engines.loading import cpu_share, is_on_cpu
from worker.engines.vllm_environment import engine_environment, set_environment


def prepare_host(settings: WorkerSettings) -> list[str]:
    """Set the environment of the fork-server; the modules that it imports for its processes.

    None of them touches a device: what has a CUDA context must never be forked.
    """
    if settings.engine == "simulated":
        return ["worker.engines.simulated"]
    on_cpu = is_on_cpu(settings)
    cores = cpu_share(sorted(os.sched_getaffinity(0)), settings.slots, 0)
    environment = engine_environment(cpu=on_cpu, cores=cores if on_cpu else ())
    environment.pop("VLLM_CPU_OMP_THREADS_BIND", None)  # each process has its own
    set_environment(environment)
    return ["worker.engines.vllm_engine"]
