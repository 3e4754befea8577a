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
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypedDict, Unpack

from tokenyard.protocol.errors import InvalidRequest, SettingsError
from tokenyard.protocol.replies import Delta, Result
from tokenyard.protocol.settings import DeviceName, EngineName, WorkerSettings
from worker.engines import EngineInfo
from worker.engines.devices import with_device
from worker.local.booking import Booking
from worker.local.pool import LocalPool, ProcessStatus
from worker.local.requests import Prompt, RequestBatch, as_prompts, make_requests, own_spec
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


#: Levels of sleep.
_LEVELS: Final = (1, 2)


class EngineHandle:
    """An engine in a process of a `WorkerController`, which creates it; thread-safe.

    If its process dies, waiting calls raise `tokenyard.protocol.errors.EngineLost`. The model is
    loaded again, in another process if one is warm, and later calls wait for it.
    """

    def __init__(self, pool: LocalPool, booking: Booking, timeout_s: float) -> None:
        self._pool = pool
        self._booking = booking
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<EngineHandle {self.model} on {self.devices}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._booking.spec.name

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices that it runs on."""
        return self._booking.devices

    @property
    def info(self) -> EngineInfo:
        """The engine's report of its last start."""
        info = self._booking.info
        if info is None:
            raise AssertionError("an engine that has never been up has no handle")
        return info

    @property
    def phases_s(self) -> Mapping[str, float]:
        """Seconds by phase of its last load or wake."""
        return self.info.phases_s

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> list[Result]:
        """Run one or more prompts; returns their results in order, including failed ones.

        ``model`` may name an adapter. ``sampling`` takes parameters by vLLM's names; the model's
        spec has the defaults, then vLLM. If all prompts are chats, it also takes chat options
        (``tools``, ``documents``, ``chat_template_kwargs``, ``add_generation_prompt``,
        ``continue_final_message``). Raises `InvalidRequest` before anything runs, `EngineLost`,
        and `WaitTimeout` if no result arrives for ``timeout_s``.
        """
        requests = make_requests(self._booking.spec, as_prompts(prompts), sampling, model=model)
        call = RequestBatch(requests)
        try:
            self._pool.ask(self._booking, call)
            return call.results(self._patience(timeout_s))
        finally:
            self._pool.forget(self._booking, call)

    def stream(
        self, prompt: Prompt, *, model: str = "", timeout_s: float | None = None, **sampling: Any
    ) -> Generator[Delta | Result, None, None]:
        """Yield the answer to one prompt in deltas, then its result; see `generate`.

        The deltas add up to the whole answer. Closing the iterator early cancels the request.
        """
        spec = self._booking.spec
        call = RequestBatch(make_requests(spec, [prompt], sampling, model=model, stream=True))
        self._pool.ask(self._booking, call)
        return self._pieces(call, self._patience(timeout_s))

    def _pieces(
        self, call: RequestBatch, timeout_s: float
    ) -> Generator[Delta | Result, None, None]:
        try:
            yield from call.stream(timeout_s)
        finally:
            self._pool.forget(self._booking, call)

    def sleep(self, level: int = 1, *, timeout_s: float | None = None) -> None:
        """Release the device after the running requests; `wake` takes it again.

        Level 1 keeps the weights in the host's memory; after level 2, `wake` reads them again. If
        the device does not support sleep, or another engine needs the process, the model is
        unloaded, and `wake` loads it. Raises `InvalidRequest` for another level,
        `worker.engines.Unsupported` on several devices, `EngineLost`, `WaitTimeout`.
        """
        if level not in _LEVELS:
            raise InvalidRequest("level", f"use one of {', '.join(map(str, _LEVELS))}")
        order = partial(self._pool.bookings.put_to_sleep, self._booking, level)
        self._pool.carry_out(order, self._booking, "asleep", self._patience(timeout_s))

    def wake(self, *, timeout_s: float | None = None) -> None:
        """Take the device again; raises `NoFreeDevice`, `LoadFailed` or `WaitTimeout`."""
        order = partial(self._pool.bookings.wake, self._booking)
        self._pool.carry_out(order, self._booking, "awake", self._patience(timeout_s))

    def resize(
        self,
        *,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Run the engine on more or fewer devices; sizes left out stay the same.

        vLLM cannot resize a live engine, because it splits the weights when it loads them. So
        running requests finish (after ``drain_timeout_s`` they fail with `EngineLost`), the model
        is unloaded, and warm processes load it in the new size. Calls made meanwhile wait for
        that. Released devices are free for other engines.

        Raises `InvalidRequest` for an invalid size, `NoFreeDevice` immediately if too few devices
        are free, `LoadFailed` with the engine's reason (the engine then returns to its old size),
        `EngineLost` while the model is being loaded again, and `WaitTimeout` (the resize
        continues).
        """
        spec = self._booking.spec
        tensor, pipeline = tensor_parallel_size, pipeline_parallel_size
        other = replace(
            spec,
            tensor_parallel_size=spec.tensor_parallel_size if tensor is None else tensor,
            pipeline_parallel_size=spec.pipeline_parallel_size if pipeline is None else pipeline,
        )
        if other != spec:
            order = partial(self._pool.bookings.resize, self._booking, own_spec(other))
            self._pool.carry_out(order, self._booking, "resized", self._patience(timeout_s))

    def close(self, *, timeout_s: float | None = None) -> None:
        """Unload the model after the running requests; idempotent.

        Raises `WaitTimeout`; the engine ends nevertheless.
        """
        if not self._booking.gone.done():
            order = partial(self._pool.bookings.release, self._booking)
            self._pool.carry_out(order, self._booking, "gone", self._patience(timeout_s))

    def _patience(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s
