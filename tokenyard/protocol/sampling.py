"""The support for each sampling parameter of vLLM, in one table.

A name is either accepted, and then a field of `tokenyard.protocol.wire.SamplingParams`, or refused
with the reason. A test compares the table with the installed ``vllm.SamplingParams``, so that each
new parameter needs a decision; docs/parity.md is generated from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tokenyard.protocol.texts import did_you_mean
from tokenyard.protocol.wire import SamplingParams

#: Most bytes of a constraint on the text by default: as much as OpenAI takes, and a bit.
MAX_GRAMMAR_BYTES: Final = 128 * 1024
_TEXT: Final = "as in vLLM, where replies carry text"
_DEVICE: Final = "as in vLLM, which refuses it where its model runner cannot"

#: The meaning of accepted parameters, where it is not just that in vLLM.
_MEANINGS: Final[Mapping[str, str]] = {
    "n": "as in vLLM, up to 64",
    "watermarking": "as in vLLM, where the engine has a watermark configured",
    "seed": "as in vLLM; -1 is none",
    "stop": _TEXT,
    "logprobs": "as in vLLM, up to the model's `max_logprobs`; -1 is the whole vocabulary",
    "prompt_logprobs": "as `logprobs`",
    "prompt_logprob_token_ids": _DEVICE + "; the scores stand in `prompt_logprobs` of the result",
    "prompt_logprob_start": "with `prompt_logprob_token_ids`",
    "logprob_token_ids": (
        "with vLLM's V2 model runner; the older one mixes up the logprobs of requests that run"
        " beside it, so it is refused there"
    ),
    "flat_logprobs": "taken, without effect: replies have one form of logprobs",
    "detokenize": "left out: where the prompt was text",
    "skip_special_tokens": _TEXT,
    "spaces_between_special_tokens": _TEXT,
    "include_stop_str_in_output": _TEXT,
    "stream_interval": "tokens in a delta, with `stream`; the first and the last come at once",
    "extra_args": "as in vLLM (`vllm_xargs` of its server), for plugins",
    "thinking_token_budget": "as in vLLM, where the model has a reasoning parser",
    "repetition_detection": "as in vLLM: an object of `max_pattern_size`, `min_pattern_size`,"
    " `min_count`",
    "trace_decode_token_ids": "as in vLLM, where the engine replays traces",
}

#: Accepted parameters, and their meaning.
TAKEN: Final[Mapping[str, str]] = {
    name: _MEANINGS.get(name, "as in vLLM") for name in SamplingParams.__struct_fields__
}

#: Refused parameters, and the reasons.
REFUSED: Final[Mapping[str, str]] = {
    "output_kind": "the request's field `stream` says whether there are deltas",
    "skip_clone": "internal to the process of the engine",
    "output_text_buffer_length": "internal: vLLM derives it from `stop`",
    "routed_experts_prompt_start": "replies do not carry routed experts",
}


def why_unknown(name: str) -> str:
    """The error message for a name that is not accepted."""
    reason = REFUSED.get(name)
    if reason:
        return f"is not taken: {reason}"
    return f"there is no such parameter{did_you_mean(name, TAKEN)}"


def grammar_fault(constraint: Mapping[str, Any], most: int) -> str:
    """What is wrong where `structured_outputs` has more than ``most`` bytes, as JSON; else ""."""
    size = len(json.dumps({name: value for name, value in constraint.items() if value}))
    return grammar_too_large(size, most) if size > most else ""


def grammar_too_large(size: int, most: int) -> str:
    """What is wrong with a constraint of so many bytes."""
    return f"has {size} bytes; at most {most} are taken (max_grammar_bytes)"
