"""The environment and the imported modules that all worker processes of a host share."""

from __future__ import annotations

from tokenyard.protocol.settings import WorkerSettings
from worker.engines.cpu_features import missing_here
from worker.engines.loading import is_on_cpu, prepare_environment
from worker.engines.vllm.environment import engine_modules


def prepare_host(settings: WorkerSettings) -> list[str]:
    """Set the environment of the fork-server; returns the modules that it imports.

    None of them touches a device: a process with a CUDA context must never fork.
    """
    prepare_environment(settings)
    if settings.engine == "simulated":
        return ["worker.process.main", "worker.engines.simulated.engine"]
    on_cpu = is_on_cpu(settings)
    if on_cpu and missing_here():
        # vLLM's import would kill the fork-server. The processes report why.
        return ["worker.process.main"]
    engine = engine_modules(cpu=on_cpu)
    return ["worker.process.main", *engine, "worker.engines.preloaded"]
