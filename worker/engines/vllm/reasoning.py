"""Where the reasoning of an answer ends, for constraints that begin there.

vLLM's server tells its engine whether the prompt ends the reasoning, and the arguments of the
parser that finds the end in the answer. `LLMEngine.add_request` has no parameters for these two, so
they are set in the request that vLLM makes of its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.engine import EngineCoreRequest

from tokenyard.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

    from tokenyard.protocol.wire import Request

_ENDED = "reasoning_ended"
_KWARGS = "reasoning_parser_kwargs"
_IS_KNOWN = {_ENDED, _KWARGS} <= set(EngineCoreRequest.__struct_fields__)


class Reasoning:
    """The reasoning parser of one engine."""

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        self._name = getattr(config.structured_outputs_config, "reasoning_parser", "")
        self._tokenizer = tokenizer

    def concerns(self, request: Request) -> bool:
        """Whether the request's answer depends on where its reasoning ends."""
        tells = request.reasoning_ended is not None or bool(request.reasoning_parser_kwargs)
        return tells and bool(self._name) and request.params.structured_outputs is not None

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for arguments that the parser does not take.

        vLLM makes the parser in a step, where an exception would end the engine.
        """
        if not self.concerns(request):
            return
        if not _IS_KNOWN:
            field = _KWARGS if request.reasoning_parser_kwargs else _ENDED
            raise InvalidRequest(field, f"vLLM {vllm.__version__} of this worker does not know it")
        from vllm.reasoning import ReasoningParserManager

        make: Any = ReasoningParserManager.get_reasoning_parser(self._name)
        try:
            make(tokenizer=self._tokenizer, **request.reasoning_parser_kwargs)
        except Exception as error:  # whatever the parser raises
            raise InvalidRequest(_KWARGS, f"{self._name} refuses it: {error}"[:1000]) from error

    def prepare(
        self,
        engine: LLMEngine,
        request_id: str,
        prompt: Any,
        params: vllm.SamplingParams,
        lora: LoRARequest | None,
        request: Request,
    ) -> EngineCoreRequest:
        """The request as vLLM's engine takes it, with what was told; raises vLLM's errors."""
        made = engine.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            engine.get_supported_tasks(),
            lora_request=lora,
            priority=request.priority,
        )
        made.reasoning_ended = request.reasoning_ended
        made.reasoning_parser_kwargs = request.reasoning_parser_kwargs or None
        return made
