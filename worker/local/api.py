"""Engines within seconds, for a program without Redis: a pool of warm processes of its own.

    from worker import WorkerController

    if __name__ == "__main__":
        with WorkerController("models.toml", slots=2) as controller:
            with controller.create("adder") as engine:
                print(engine.generate("12+34=", temperature=0)[0].text)

docs/warm-workers.md has more. Processes come from a fork-server, so a script needs its
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
from worker.local.pool import LocalPool
from worker.local.requests import own_spec
from worker.local.status import ProcessStatus
from worker.models import ModelSpec, read_models

DEFAULT_TIMEOUT_S: Final = 600.0


class PoolOptions(TypedDict, total=False):
    """More of `tokenyard.protocol.settings.WorkerSettings`, which explains them."""

    start_timeout_s: float
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
    """Keeps warm processes, and makes engines of them; any thread may use it.

    ``models`` is a models file (docs/models.md), or specs by name, or None where `create` is only
    given specs. ``slots`` devices have one warm process each; ``spares`` more stand in for one
    that dies, and ``sleepers`` more on each device let that many engines sleep there. Engines use
    the GPUs or the CPU as ``device`` says; ``devices`` are GPUs by index or UUID, one for each
    slot. ``timeout_s`` bounds every wait that is given no bound of its own.
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
        """Raises `SettingsError` with everything that is wrong, also in the models file."""
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
        self._turn = threading.Lock()  # held while it starts

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to warm processes up, and return at once; does nothing where that is done.

        With vLLM's build for GPUs it takes some seconds to look at them. Raises `SettingsError`
        where the device cannot be had. Sets environment variables that vLLM needs, also for
        this process.
        """
        with self._turn:
            if self._pool is not None:
                return
            settings = with_device(self._settings)
            _prepare_once(settings)
            pool = LocalPool(settings)
            pool.start()
            self._pool = pool
            # Before multiprocessing's own: it would wait for processes that wait for us.
            atexit.register(self._end)

    def wait_warm(self, timeout_s: float | None = None) -> None:
        """Wait until every process has warmed up; raises `WaitTimeout`. `create` need not."""
        self._running().wait_warm(self._patience(timeout_s))

    def create(self, model: str | ModelSpec, *, timeout_s: float | None = None) -> EngineHandle:
        """Load a model on free devices, as many as it has ranks, in processes that are warm.

        Waits for a process that is still warming up. Raises `InvalidRequest` for a model that is
        not listed or not sound, `NoFreeDevice` at once where other engines hold the devices,
        `LoadFailed` with the engine's reason (the process stays warm), and `WaitTimeout` (the
        load is given up).
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
        """Let an engine finish what runs, and its processes be warm again; idempotent.

        Raises `WaitTimeout`; it goes nevertheless.
        """
        engine.close(timeout_s=self._patience(timeout_s))

    def status(self) -> list[ProcessStatus]:
        """The processes as they are now, ready to be printed; none where it does not run."""
        pool = self._pool
        return pool.statuses if pool else []

    def stop(self, timeout_s: float | None = None) -> None:
        """End all engines and processes; idempotent, and it may be started again.

        Running requests may finish for ``grace_s``; called again meanwhile, it stops at once.
        """
        pool = self._pool
        if pool is not None:
            pool.stop(self._patience(timeout_s))
            self._pool = None
            atexit.unregister(self._end)

    def _end(self) -> None:
        """The program ends: nobody waits for answers any more."""
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
    """The fork-server of a program is started once, and keeps the environment that it got.

    Raises `SettingsError` where this one is of no use.
    """
    with _preparing:
        wanted = (settings.engine, settings.device, settings.devices)
        if settings.engine == "vllm" and _prepared - {wanted}:
            fault = "this program has had a pool with others; use a new process"
            raise SettingsError([f"engine, device, devices: {fault}"])
        _prepared.add(wanted)
