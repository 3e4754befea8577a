"""An engine as a program holds it: it generates, and goes when it is closed."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.replies import Delta, Result
from worker.engines import EngineInfo
from worker.local.booking import Booking
from worker.local.pool import LocalPool
from worker.local.request_batch import RequestBatch
from worker.local.requests import Prompt, as_prompts, make_requests, own_spec

#: As deep as engines sleep.
_LEVELS: Final = (1, 2)


class EngineHandle:
    """An engine in a process of a `WorkerController`, which makes it; any thread may use it.

    When its process dies, the calls that wait raise `tokenyard.protocol.errors.EngineLost`. The
    model is loaded again, in another process where there is a warm one, and later calls wait for
    that.
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
        """Where it is."""
        return self._booking.devices

    @property
    def info(self) -> EngineInfo:
        """What it said of itself when it came up the last time."""
        info = self._booking.info
        if info is None:
            raise AssertionError("an engine that has never been up has no handle")
        return info

    @property
    def phases_s(self) -> Mapping[str, float]:
        """Seconds by phase of its last load, or of its last wake."""
        return self.info.phases_s

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> list[Result]:
        """The results of one or more prompts, in their order; of failed ones, too.

        ``model`` may name an adapter. ``sampling`` are parameters by vLLM's names; what is left
        out is as the model's spec says, else as in vLLM. Beside them may stand what a chat is given
        (``tools``, ``documents``, ``chat_template_kwargs``, ``add_generation_prompt``,
        ``continue_final_message``), if all prompts are chats. Raises `InvalidRequest` before
        anything is run, `EngineLost`, and `WaitTimeout` where no result comes for ``timeout_s``.
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
        """The answer to one prompt piece by piece, and then its result; see `generate`.

        The pieces are the whole answer. To close the iterator early ends the request.
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
        """Give the device free once running requests are done; `wake` brings it back.

        At level 1 the weights stay in the host's memory, at 2 they are read again. Where the
        device knows no sleep, and where another engine needs the process, the model is unloaded,
        and `wake` loads it. Raises `InvalidRequest` for another level,
        `worker.engines.Unsupported` on several devices, `EngineLost`, `WaitTimeout`.
        """
        if level not in _LEVELS:
            raise InvalidRequest("level", f"use one of {', '.join(map(str, _LEVELS))}")
        self._pool.put_to_sleep(self._booking, level, self._patience(timeout_s))

    def wake(self, *, timeout_s: float | None = None) -> None:
        """Take the device again; raises `NoFreeDevice`, `LoadFailed` or `WaitTimeout`."""
        self._pool.wake(self._booking, self._patience(timeout_s))

    def resize(
        self,
        *,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Run it on more or fewer devices; what is left out stays as it is.

        vLLM cannot change the size of a live engine: its weights are split when they are loaded.
        So what runs is finished (within ``drain_timeout_s``; then it ends as `EngineLost`), the
        model is unloaded, and warm processes load it in the other size. Calls that are made
        meanwhile wait for that. Devices that are given up are free for others.

        Raises `InvalidRequest` for a size that makes no sense, `NoFreeDevice` at once where there
        are not enough, `LoadFailed` with the engine's reason, after which it is loaded as it was,
        `EngineLost` where it is being loaded again, and `WaitTimeout` (it goes on).
        """
        spec = self._booking.spec
        tensor, pipeline = tensor_parallel_size, pipeline_parallel_size
        other = replace(
            spec,
            tensor_parallel_size=spec.tensor_parallel_size if tensor is None else tensor,
            pipeline_parallel_size=spec.pipeline_parallel_size if pipeline is None else pipeline,
        )
        if other != spec:
            self._pool.resize(self._booking, own_spec(other), self._patience(timeout_s))

    def close(self, *, timeout_s: float | None = None) -> None:
        """Let go of the model once running requests are done; idempotent.

        Raises `WaitTimeout`; it goes nevertheless.
        """
        if not self._booking.gone.done():
            self._pool.release(self._booking, self._patience(timeout_s))

    def _patience(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s
