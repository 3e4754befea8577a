"""Engines within seconds for a program without Redis, from its own pool of warm processes.

    from worker import WorkerController

    if __name__ == "__main__":
        with WorkerController("models.toml", slots=2) as controller:
            with controller.create("adder") as engine:
                print(engine.generate("12+34=", temperature=0)[0].text)

docs/warm-workers.md has more. A fork-server starts the processes, so a script needs
``if __name__ == "__main__":``.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypedDict, Unpack

from tokenyard.protocol.errors import InvalidRequest, SettingsError
from tokenyard.protocol.settings import DeviceName, EngineName, WorkerSettings
from worker.engines.devices import with_device
from worker.local.booking import Booking
from worker.local.engine import EngineHandle
from worker.local.pool import LocalPool, ProcessStatus
from worker.local.requests import own_spec
from worker.models import ModelSpec, read_models

DEFAULT_TIMEOUT_S: Final = 600.0


class PoolOptions(TypedDict, total=False):
    """Further options; `tokenyard.protocol.settings.WorkerSettings` documents them."""

    start_timeout_s: float
    load_timeout_s: float
    drain_timeout_s: float
    leak_tolerance: float
    leak_floor_mib: float
    hang_timeout_s: float
    grace_s: float
    backoff_s: float
    max_backoff_s: float
    simulated_prefill_rate: float
    simulated_step_s: float
    simulated_cache_tokens: int
    simulated_load_s: float
    crash_point: str


class WorkerController:
    """Keeps warm processes and creates engines in them; thread-safe.

    ``models`` is a models file (docs/models.md), specs by name, or None if `create` is only called
    with specs. Each of the ``slots`` devices has one warm process; ``spares`` more replace
    processes that die, and ``sleepers`` more per device let that many engines sleep there.
    ``device`` selects GPUs or the CPU; ``devices`` lists GPUs by index or UUID, one per slot.
    ``timeout_s`` is the default timeout of every wait.
    """

    def __init__(
        self,
        models: Path | str | Mapping[str, ModelSpec] | None = None,
        slots: int = 1,
        *,
        spares: int = 0,
        sleepers: int = 0,
        engine: EngineName = "vllm",
        device: DeviceName = "auto",
        devices: Sequence[str | int] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Unpack[PoolOptions],
    ) -> None:
        """Raises `SettingsError` with every fault, including those of the models file."""
        self._settings = WorkerSettings(
            redis_url="",
            name="local",
            engine=engine,
            slots=slots,
            spares=spares,
            sleepers=sleepers,
            device=device,
            devices=tuple(str(device) for device in devices),
            **options,
        )
        if isinstance(models, Path | str):
            models = read_models(Path(models))
        self._models = dict(models or {})
        self._timeout_s = timeout_s
        self._pool: LocalPool | None = None
        self._turn = threading.Lock()  # held during start

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start to warm up processes and return immediately; idempotent.

        With vLLM's GPU build, the inspection of the GPUs takes some seconds. Raises
        `SettingsError` if the device is not available. Sets environment variables that vLLM needs,
        in this process too.
        """
        with self._turn:
            if self._pool is not None:
                return
            settings = with_device(self._settings)
            _prepare_once(settings)
            pool = LocalPool(settings)
            pool.start()
            self._pool = pool
            # Runs before multiprocessing's handler, which would wait for processes that wait for
            # this one.
            atexit.register(self._end)

    def wait_warm(self, timeout_s: float | None = None) -> None:
        """Wait until every process is warm; raises `WaitTimeout`. `create` does not need it."""
        self._running().wait_warm(self._patience(timeout_s))

    def create(self, model: str | ModelSpec, *, timeout_s: float | None = None) -> EngineHandle:
        """Load a model in warm processes, on one free device per rank.

        Waits for a process that is still warming up. Raises `InvalidRequest` for a model that is
        not listed or not valid, `NoFreeDevice` immediately if other engines hold the devices,
        `LoadFailed` with the engine's reason (the process is replaced), and `WaitTimeout` (the
        load is cancelled).
        """
        pool, patience_s = self._running(), self._patience(timeout_s)
        spec = own_spec(self._spec(model))
        if not 0 < spec.ranks <= self._settings.slots:
            message = f"{spec.name} takes {spec.ranks} devices, of {self._settings.slots} in all"
            raise InvalidRequest("model", message)
        booking = Booking(spec)
        pool.book(booking, patience_s)
        return EngineHandle(pool, booking, self._timeout_s)

    def delete(self, engine: EngineHandle, *, timeout_s: float | None = None) -> None:
        """Finish an engine's running requests and return its processes to warm; idempotent.

        Raises `WaitTimeout`; the engine ends nevertheless.
        """
        engine.close(timeout_s=self._patience(timeout_s))

    def status(self) -> list[ProcessStatus]:
        """The current status of each process, printable; empty if the controller does not run."""
        pool = self._pool
        return pool.statuses if pool else []

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop all engines and processes; idempotent. The controller can be started again.

        Running requests have ``grace_s`` to finish; a second call meanwhile stops immediately.
        """
        pool = self._pool
        if pool is not None:
            pool.stop(self._patience(timeout_s))
            self._pool = None
            atexit.unregister(self._end)

    def _end(self) -> None:
        """Stop immediately when the program exits: no thread waits for answers."""
        pool = self._pool
        if pool is not None:
            pool.stop(self._timeout_s, at_once=True)

    def _running(self) -> LocalPool:
        pool = self._pool
        if pool is None:
            raise RuntimeError("the controller does not run; start it first")
        return pool

    def _spec(self, model: str | ModelSpec) -> ModelSpec:
        if isinstance(model, ModelSpec):
            return model
        if model not in self._models:
            known = f"use {', '.join(self._models)}" if self._models else "give a ModelSpec"
            raise InvalidRequest("model", f"{model!r} is not listed; {known}")
        return self._models[model]

    def _patience(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s


_prepared: set[tuple[str, str, tuple[str, ...]]] = set()
_preparing = threading.Lock()


def _prepare_once(settings: WorkerSettings) -> None:
    """Check that these settings fit the program's fork-server, whose environment cannot change.

    Raises `SettingsError` if an earlier pool started it with other settings.
    """
    with _preparing:
        wanted = (settings.engine, settings.device, settings.devices)
        if settings.engine == "vllm" and _prepared - {wanted}:
            fault = "this program has had a pool with others; use a new process"
            raise SettingsError([f"engine, device, devices: {fault}"])
        _prepared.add(wanted)
