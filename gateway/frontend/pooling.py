"""Requests that pool: which model does which task, and the inputs of one HTTP request together.

vLLM's server encodes each input by itself. Here those of one HTTP request share few requests on the
queue: an input costs a millisecond, a request about as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.outputs import PoolingOutput, PoolingRequestOutput

from gateway.frontend.media import can_hear
from gateway.http.errors import GatewayError, of_result
from gateway.http.incoming import TRANSCRIBING
from tokenyard.protocol.packs import in_packs
from tokenyard.protocol.replies import Result, data_of_inputs
from tokenyard.protocol.texts import pip_install

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.tasks import PoolingTask, SupportedTask
    from vllm.v1.engine import EngineCoreRequest

Output = PoolingRequestOutput[PoolingOutput]
#: Most tokens of the inputs that share a request.
_PACK_TOKENS: Final = 16_384
_EMBEDS: Final[tuple[PoolingTask, ...]] = "embed", "token_embed"
_CLASSIFIES: Final[tuple[PoolingTask, ...]] = "classify", "token_classify"
#: What vLLM can do with a model, by how it scores with it.
_TASKS_OF: Final[Mapping[str, tuple[PoolingTask, ...]]] = {
    "bi-encoder": _EMBEDS,
    "cross-encoder": _CLASSIFIES,
    "late-interaction": ("token_embed",),
}
_TOKEN_CLASSES: Final = ("ForTokenClassification", "RewardModel")
#: The tasks of a path, of which a model must have one.
PATHS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/embeddings": ("embed",),
    "/v2/embed": ("embed",),
    "/classify": ("classify",),
    "/pooling": ("embed", "classify", "token_embed", "token_classify"),
    **dict.fromkeys(
        ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        ("embed", "classify", "token_embed"),
    ),
    **dict.fromkeys(TRANSCRIBING, ("transcription",)),
}


def tasks_of(model: ModelConfig) -> tuple[SupportedTask, ...]:
    """What vLLM can do with a model, as its configuration shows; a worker has the last word."""
    if model.runner_type != "pooling":
        asked = model.architectures, model
        if not model.registry.is_transcription_model(*asked):
            return ("generate",)
        is_all = model.registry.is_transcription_only_model(*asked)
        return ("transcription",) if is_all else ("generate", "transcription")
    configured = model.pooler_config and model.pooler_config.task
    if configured:
        return _EMBEDS if configured in _EMBEDS else _CLASSIFIES
    if any(name.endswith(_TOKEN_CLASSES) for name in model.architectures):
        return ("token_classify",)
    return _TASKS_OF[model.score_type]


def check_path(path: str, name: str, model: ModelConfig, tasks: tuple[SupportedTask, ...]) -> None:
    """Raises `GatewayError` where a model with its `tasks_of` cannot answer at a path."""
    needed = PATHS.get(path, ("generate",))
    pools = model.get_pooling_task(tasks)
    does = (pools,) if pools else tasks
    if not {*does} & {*needed}:
        able = " and ".join(does)
        message = f"the model {name!r} does {able}; {path} needs {' or '.join(needed)}"
        raise GatewayError(400, message, param="model")
    if path in TRANSCRIBING and not can_hear():
        raise GatewayError(501, f"this gateway cannot read sound: {pip_install('audio')}")


@dataclass(slots=True)
class InputGroup:
    """The inputs of one HTTP request that came in the same moment."""

    ask: Callable[[list[EngineCoreRequest]], Coroutine[Any, Any, Result]]
    waiting: int = 0
    _parts: list[tuple[EngineCoreRequest, asyncio.Future[Output]]] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def output_of(self, core: EngineCoreRequest, close: Callable[[], None]) -> Output:
        """The output of one input; ``close`` is called when no more can join the group."""
        loop = asyncio.get_running_loop()
        output: asyncio.Future[Output] = loop.create_future()
        if not self._parts:  # all inputs of a body are asked for in one turn of the loop
            loop.call_soon(self._start, close)
        self._parts.append((core, output))
        self.waiting += 1
        try:
            return await output
        finally:
            self.waiting -= 1
            if not self.waiting and self._task is not None:  # the last, or nobody waits any more
                self._task.cancel()

    def _start(self, close: Callable[[], None]) -> None:
        close()
        if self.waiting:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        packs = in_packs(self._parts, lambda one: _length(one[0]), _PACK_TOKENS)
        await asyncio.gather(*map(self._answer, packs))

    async def _answer(self, pack: list[tuple[EngineCoreRequest, asyncio.Future[Output]]]) -> None:
        parts = [core for core, _ in pack]
        try:
            made = outputs_of(parts, await self.ask(parts))
        except Exception as error:  # noqa: BLE001 - each input waits for it
            made = [error] * len(pack)
        for (_, output), one in zip(pack, made, strict=True):
            if output.done():
                continue
            if isinstance(one, Exception):
                output.set_exception(one)
            else:
                output.set_result(one)


def _length(core: EngineCoreRequest) -> int:
    return len(core.prompt_token_ids or ())


def outputs_of(parts: Sequence[EngineCoreRequest], result: Result) -> list[Output | Exception]:
    """The output of each input, or why it has none."""
    found: list[Output | Exception] = []
    errors = result.errors or {}
    for at, (part, (shape, data)) in enumerate(zip(parts, data_of_inputs(result), strict=True)):
        if shape is None:
            found.append(of_result(errors.get(at)))
            continue
        own = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
        found.append(
            PoolingRequestOutput(
                request_id=part.request_id,
                outputs=PoolingOutput(own),
                prompt_token_ids=list(part.prompt_token_ids or ()),
                num_cached_tokens=0,
                finished=True,
            )
        )
    return found
