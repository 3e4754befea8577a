"""A program's handle of an engine, which generates and ends when it is closed."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.replies import Delta, Result
from worker.engines import EngineInfo
from worker.local.booking import Booking
from worker.local.pool import LocalPool
from worker.local.requests import Prompt, RequestBatch, as_prompts, make_requests, own_spec

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
