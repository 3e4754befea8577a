"""The outputs of a request that pools: the numbers of its inputs, or why one has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm import PoolingParams

from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.replies import Choice, ErrorInfo
from tokenyard.protocol.wire import prompt_field
from worker.engines import EngineEvent, Finished, PoolingOutput, RequestError
from worker.engines.vllm.request import EngineRequest

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput, RequestOutput

#: Makes scores of the outputs of the query, where it has some, and of the inputs.
Join = Callable[[list["PoolingRequestOutput"]], Sequence["PoolingRequestOutput"]]
#: Most bytes of the numbers of one request: a server takes no value of 512 MiB.
MAX_DATA_BYTES: Final = 64 * 1024 * 1024
#: The place of the query among the parts of a score.
QUERY: Final = -1


@dataclass(slots=True)
class PoolingAnswer:
    """The outputs of one request that pools."""

    asked: EngineRequest
    count: int
    join: Join | None = None
    has_query: bool = False
    refused: dict[int, InvalidRequest] = field(default_factory=dict)
    outputs: dict[int, PoolingRequestOutput] = field(default_factory=dict)
    fault: str = ""

    def field_of(self, index: int) -> str:
        """The name of an input in an error."""
        if index == QUERY:
            return "query"
        request = self.asked.assignment.request
        return prompt_field(request) if request.inputs is None else f"inputs[{index}]"

    def refuse(self, index: int, why: str) -> None:
        """One input cannot run; raises the error where it is the only one, or all need it."""
        error = InvalidRequest(self.field_of(index), why)
        if index == QUERY or self.asked.assignment.request.inputs is None:
            raise error
        self.refused[index] = error

    @property
    def is_over(self) -> bool:
        """Whether all inputs have their outputs, or one has met a fault."""
        pending = self.count - len(self.refused) + self.has_query
        return bool(self.fault) or len(self.outputs) == pending or len(self.refused) == self.count

    def end(self) -> EngineEvent:
        """The answer once it `is_over`."""
        if self.fault:
            return RequestError(self.asked.key, Code.INFERENCE_ERROR, self.fault)
        ran = [index for index in range(self.count) if index not in self.refused]
        outputs = [self.outputs[index] for index in ran]
        if self.join and outputs:
            query = [self.outputs[QUERY]] if self.has_query else []
            outputs = list(self.join(query + outputs))
        tensors = [torch.as_tensor(getattr(one.outputs, "data", one.outputs)) for one in outputs]
        size = sum(4 * one.numel() for one in tensors)
        if size > MAX_DATA_BYTES:
            why = (
                f"the numbers take {size} bytes, of at most {MAX_DATA_BYTES}; ask for fewer inputs"
            )
            return RequestError(
                self.asked.key, Code.INVALID_REQUEST, str(InvalidRequest("inputs", why))
            )
        if self.join:
            tensors = [one.reshape(()) for one in tensors]
        shapes: list[list[int] | None] = [None] * self.count
        for index, one in zip(ran, tensors, strict=True):
            shapes[index] = list(one.shape)
        data = b"".join([one.float().contiguous().numpy().tobytes() for one in tensors])
        errors = {
            index: ErrorInfo(Code.INVALID_REQUEST, str(error))
            for index, error in self.refused.items()
        }
        used = [0] * self.count
        for index in ran:
            used[index] = len(self.outputs[index].prompt_token_ids)
        return self._finished(PoolingOutput(data, shapes, errors, used))

    def so_far(self) -> Finished:
        """What it has cost so far."""
        return self._finished(None)

    def _finished(self, pooling: PoolingOutput | None) -> Finished:
        outputs = self.outputs.values()
        return Finished(
            self.asked.key,
            [Choice(0, [])],
            sum(len(one.prompt_token_ids) for one in outputs),
            cached_tokens=sum(one.num_cached_tokens or 0 for one in outputs),
            pooling=pooling,
        )


class PooledPart:
    """What vLLM runs for one input, or for the query: see `worker.engines.vllm.engine`.

    ``prompt`` is rendered.
    """

    def __init__(
        self, answer: PoolingAnswer, index: int, prompt: Any, params: PoolingParams
    ) -> None:
        self.asked = answer.asked
        self.answer = answer
        self.index = index
        self.prompt = prompt
        self.params = params
        self.is_finished = False

    @property
    def request_id(self) -> str:
        """The request id in vLLM."""
        return f"{self.asked.key}#{self.index}"

    @property
    def ends_request(self) -> bool:
        """Whether nothing of the request is left to run."""
        return self.answer.is_over

    def take(self, output: RequestOutput, events: list[EngineEvent]) -> None:
        """Add the output of this part; the last one adds the answer."""
        pooled: Any = output
        self.is_finished = True
        if error := getattr(pooled, "error", None):
            self.answer.fault = str(error.message)
        self.answer.outputs[self.index] = pooled
        if self.answer.is_over:
            events.append(self.answer.end())

    def so_far(self) -> Finished:
        """What the request has cost so far."""
        return self.answer.so_far()
