"""The core of a worker process with vLLM, warm before and between models."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import traceback
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tokenyard.process.home import owned_folder
from worker.engines import (
    Backend,
    DeviceLost,
    DeviceUnusable,
    Finished,
    Memory,
    RankGroup,
    SensorReading,
)
from worker.engines.cpu_features import request_amx
from worker.engines.device import (
    DeviceLock,
    GpuSensors,
    causes,
    find_sensors,
    is_device_lost,
    is_out_of_memory,
    was_disturbed,
)
from worker.engines.stopwatch import Stopwatch
from worker.engines.vllm import warm_base
from worker.engines.vllm.environment import engine_modules
from worker.engines.vllm.grammars import GrammarLimits
from worker.models import ModelSpec

if TYPE_CHECKING:
    from worker.engines.vllm.core import Core

log = logging.getLogger("tokenyard.worker.engines")

#: Phases of a warm-up.
FIRST_MODEL: Final = "first model"
HEAP: Final = "heap"


class Groups(Protocol):
    """Forms groups of processes: `worker.executor`, which this package does not import."""

    def executor_for(self, group: RankGroup) -> Any:
        """The executor class for the leader's engine; it has a method ``release()``."""

    def attend(self, group: RankGroup) -> None:
        """Be a rank of ``group`` until its leader releases this process."""


class CoreBackend:
    """What the process of a core does with its device: it is warm before and between models."""

    def __init__(
        self,
        *,
        device: int = 0,
        cores: Sequence[int] = (),
        threads: int = 0,
        groups: Groups | None = None,
        is_alone: bool = False,
        lock: DeviceLock | None = None,
        log_stats: bool = False,
        grammars: GrammarLimits | None = None,
    ) -> None:
        """Computes on the CPU ``cores`` with one thread each, or with ``threads`` threads.

        Without cores it computes on the GPU ``device``, numbered as in vLLM, and shares it with
        other processes by ``lock``. If ``is_alone``, the process sees no other GPU and cannot join
        a group. With ``log_stats`` its engines keep vLLM's metrics.
        """
        self._lock = lock or DeviceLock()
        self._groups = groups
        self._is_alone = is_alone
        self._log_stats = log_stats
        self._grammars = grammars or GrammarLimits()
        self._device = device
        self._is_on_cpu = bool(cores)
        self._cores = cores
        self._threads = threads
        self._has_kernels = False  # set by the first load
        self._sensors: GpuSensors | None = None  # found when it takes its device

    def begin_warm_up(self, stopwatch: Stopwatch) -> None:
        """Import vLLM and do what else comes before the first model."""
        with stopwatch.phase("import"), warm_base.uncollected():
            for module in engine_modules(cpu=self._is_on_cpu):
                importlib.import_module(module)
        with self._lock.shared(), stopwatch.phase("device"):
            self._take_device()
        with stopwatch.phase(HEAP):
            warm_base.freeze()

    def attend(self, group: RankGroup) -> None:
        """Serve a group's leader; see `worker.engines.Backend.attend`."""
        with warm_base.held_back(has_kernels=self._has_kernels):
            self._require_groups().attend(group)
            warm_base.let_go()

    def memory(self) -> Memory:
        """Current memory of this process.

        While an engine sleeps on a GPU, the memory that vLLM's sleep mode has freed still counts.
        """
        import psutil  # vLLM brings both
        import torch

        device = None if self._is_on_cpu else torch.cuda.memory_reserved(self._device)
        return Memory(host=psutil.Process().memory_info().rss, device=device)

    def read_sensors(self) -> SensorReading:
        """The sensors of the GPU; see `worker.engines.Backend.read_sensors`."""
        return self._sensors.read() if self._sensors else SensorReading()

    def load(self, spec: ModelSpec, group: RankGroup | None = None, weights: str = "") -> Core:
        """Load a model; see `worker.engines.Backend.load`."""
        if group and self._is_alone:
            raise ValueError(
                f"this model takes {group.size} devices, but MIG instances cannot form a group"
            )
        # Ranks of a group wait for each other, so none may wait for other processes.
        lock = DeviceLock() if group else self._lock
        with warm_base.held_back(has_kernels=self._has_kernels), lock.exclusive():
            made = partial(self._make, spec, group, weights, lock)
            try:
                core = made()
            except Exception as error:
                if group or not was_disturbed(error):
                    raise
                log.warning("%s: another process interfered; trying again (%s)", spec.name, error)
                core = None
            core = core or made()
        self._has_kernels = True
        return core

    def _make(
        self, spec: ModelSpec, group: RankGroup | None, weights: str, lock: DeviceLock
    ) -> Core:
        from worker.engines.vllm.core import Core

        executor = self._require_groups().executor_for(group) if group else None
        try:
            return Core(
                spec,
                device=self._device,
                executor=executor,
                weights=weights,
                lock=lock,
                log_stats=self._log_stats,
                grammars=self._grammars,
            )
        except BaseException as error:
            if executor is not None:
                executor.release()
            for one in causes(error):  # their frames hold the unfinished engine
                traceback.clear_frames(one.__traceback__)
            self._clean_up_behind(error, spec)
            raise

    def _clean_up_behind(self, error: BaseException, spec: ModelSpec) -> None:
        """Make the process warm again; raises `DeviceLost` if that is impossible."""
        # Once out of memory, the allocator of vLLM's sleep mode refuses all later requests.
        is_stuck = bool(spec.sleep_level) and not self._is_on_cpu and is_out_of_memory(error)
        said = f"{type(error).__name__}: {error}"
        if is_stuck or is_device_lost(error):
            raise DeviceLost(said) from error
        try:
            warm_base.let_go()
        except Exception as more:
            if is_device_lost(more):
                raise DeviceLost(f"{said} (and then {more})") from more
            raise

    def _require_groups(self) -> Groups:
        if self._groups is None:
            raise RuntimeError("this process cannot be part of a group")
        return self._groups

    def _take_device(self) -> None:
        """Select the device and run its slow first operations."""
        if self._is_on_cpu:
            request_amx()
            use_cores(self._cores, self._threads)
            return
        import torch

        if torch.cuda._is_in_bad_fork():  # noqa: SLF001  # has no public name
            raise DeviceUnusable(
                "a module that is imported before worker processes are forked has used CUDA: one of"
                f" {', '.join(engine_modules(cpu=False))}, or a plugin of vLLM (VLLM_PLUGINS)"
            )
        torch.cuda.set_device(self._device)
        some = torch.ones((16, 16), device="cuda")
        torch.matmul(some, some)  # context, allocator and cuBLAS
        torch.cuda.synchronize()
        self._sensors = find_sensors(self._device)


def use_cores(cores: Sequence[int], threads: int = 0) -> None:
    """Compute with one thread per core, or with ``threads`` threads on ``cores``.

    Call it after all imports. Environment variables cannot do that: OpenMP reads
    ``OMP_NUM_THREADS`` once, when the fork-server loads torch, and worker processes are forked
    later. The variable is 1 during the imports (`worker.engines.vllm.environment`), so that they
    start no threads, which a fork would lose.

    OpenMP's threads spin while they wait for each other: two teams on the same cores are ten times
    slower than one. So a team is bound to its cores. A single thread is not bound: the kernel
    knows the load of the other cores.
    """
    import torch

    threads = threads or len(cores)
    if threads > 1 and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():  # pid 0 would bind only this thread
            os.sched_setaffinity(int(thread.name), cores)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # vLLM reads it too
    torch.set_num_threads(threads)


def run_first_model(backend: Backend, *, timeout_s: float = 0.0) -> None:
    """Initialize process groups, kernels and sampler, so that the first real model need not.

    ``timeout_s`` is the longest wait for the outputs of a core in another process.
    """
    from worker.engines.vllm.made_up_model import requests, write_model

    try:
        with (
            warm_base.no_kernel_warnings(),
            owned_folder("tokenyard-warmup-") as folder,
            closing(backend.load(write_model(folder))) as engine,
        ):
            news = threading.Event()
            engine.listen(news.set)
            asked = requests()
            for request in asked:
                engine.add(request)
            left = len(asked)
            while left:
                if not engine.has_unfinished and not news.wait(timeout_s):
                    raise TimeoutError(f"no output within {timeout_s:g} s")
                news.clear()
                left -= sum(isinstance(event, Finished) for event in engine.step())
    except Exception as error:
        if is_device_lost(error):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("no model runs in the warm-up, so the first takes longer: %s", reason)
        log.debug("the warm-up:", exc_info=True)


def settle() -> None:
    """Keep what the first model has left, and return the rest of its memory."""
    warm_base.freeze()
    warm_base.give_back()
