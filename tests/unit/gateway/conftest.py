"""vLLM's objects for tests of what the gateway makes of them; imported only where a test runs."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from tests.engines.harness import MODELS

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreRequest


def vllm_params(**given: Any) -> SamplingParams:
    """Sampling parameters as vLLM's front end makes them."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import SamplingParams

    return SamplingParams(**given)


@cache
def adder_tokenizer() -> TokenizerLike:
    """The tokenizer of the smallest example."""
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(MODELS / "adder")


def core_request(params: SamplingParams, prompt: list[int]) -> EngineCoreRequest:
    """A request as vLLM's input processor makes it."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id="cmpl-1",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
