"""Makes the backend of a worker process, and prepares its environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from tokenyard.protocol.settings import WorkerSettings
from worker.engines import Backend
from worker.engines.checkpoints import check_fit
from worker.engines.cpu_features import check_cpu, missing_here
from worker.engines.device import lock_of_gpu
from worker.engines.devices import find_device, own_gpu, visible_environment
from worker.engines.simulated.backend import SimulatedBackend
from worker.engines.simulated.engine import SpeedModel
from worker.engines.simulated.engine import check_weights as check_simulated
from worker.engines.vllm.backend import CoreBackend, Groups
from worker.engines.vllm.environment import (
    engine_environment,
    engine_modules,
    requested_threads,
    set_environment,
)
from worker.engines.vllm.grammars import GrammarLimits
from worker.engines.vllm.remote import RemoteBackend
from worker.models import ModelSpec


def cpu_share(cores: Sequence[int], slots: int, slot: int) -> list[int]:
    """The cores of one slot. If there are more slots than cores, slots share cores in turn.

    If there are more cores than slots, one stays free, as in vLLM's server: an engine's threads
    spin, and the threads that feed them would wait for a core.
    """
    if slots > len(cores):
        return [cores[slot % len(cores)]]
    ours = cores[: max(slots, len(cores) - 1)]
    return list(ours[slot * len(ours) // slots : (slot + 1) * len(ours) // slots])


def is_on_cpu(settings: WorkerSettings) -> bool:
    """Whether this host computes without a GPU."""
    name = settings.device if settings.device != "auto" else find_device(settings).name
    return name == "cpu"


def prepare_host(settings: WorkerSettings) -> list[str]:
    """Set the environment that all processes share; returns what their fork-server imports.

    Call it before any import of torch. Every process sees all devices (except MIG instances); its
    backend knows its own. No module touches a device: a process with a CUDA context must never
    fork.
    """
    if settings.engine == "simulated":
        return ["worker.process.main", "worker.engines.simulated.engine"]
    on_cpu = is_on_cpu(settings)
    os.environ.update(visible_environment(settings))
    set_environment(engine_environment(cpu=on_cpu))
    if on_cpu and missing_here():
        # vLLM's import would kill the fork-server. The processes report why.
        return ["worker.process.main"]
    engine = engine_modules(cpu=on_cpu)
    return ["worker.process.main", *engine, "worker.engines.preloaded"]


def make_backend(settings: WorkerSettings, core: str) -> Backend:
    """The backend of a process; imports nothing heavy.

    With vLLM its core listens at the address ``core``; the simulated engine needs none. Raises
    `worker.engines.DeviceUnusable` on a CPU that vLLM cannot run on.
    """
    if settings.engine == "simulated":
        step_s = settings.simulated_step_s
        speed = SpeedModel(
            prefill_tokens_per_s=settings.simulated_prefill_rate,
            decode_tokens_per_s=1 / step_s if step_s else 0.0,
            cache_tokens=settings.simulated_cache_tokens,
        )
        return SimulatedBackend(
            speed=speed, load_s=settings.simulated_load_s, crash_point=settings.crash_point
        )
    if is_on_cpu(settings):
        check_cpu()
    return RemoteBackend(
        core,
        timeout_s=settings.start_timeout_s,
        log_stats=bool(settings.metrics_port),
        grammars=_grammar_limits(settings),
    )


def make_core_backend(
    settings: WorkerSettings, device: int, groups: Groups | None = None
) -> CoreBackend:
    """The backend of a core for this device; imports nothing heavy.

    Without ``groups`` the process cannot join a group. Raises `worker.engines.DeviceUnusable` on a
    CPU that vLLM cannot run on.
    """
    make = partial(
        CoreBackend,
        groups=groups,
        log_stats=bool(settings.metrics_port),
        grammars=_grammar_limits(settings),
    )
    if is_on_cpu(settings):
        check_cpu()
        cores = cpu_share(sorted(os.sched_getaffinity(0)), settings.slots, device)
        return make(cores=cores, threads=requested_threads())
    gpu = own_gpu(settings, device)
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # this process has not touched CUDA yet
    number = 0 if gpu else device
    lock = lock_of_gpu(number, settings.start_timeout_s)
    return make(device=number, is_alone=bool(gpu), lock=lock)


def check_weights(settings: WorkerSettings, spec: ModelSpec, path: str) -> None:
    """Check from the files whether the weights at ``path`` fit a model.

    Raises `worker.engines.Unsupported`.
    """
    if settings.engine == "simulated":
        check_simulated(path)
    else:
        check_fit(spec.path, path)


def _grammar_limits(settings: WorkerSettings) -> GrammarLimits:
    return GrammarLimits(settings.max_grammar_bytes, settings.grammar_timeout_s)
