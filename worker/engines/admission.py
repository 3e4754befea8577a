"""What every engine refuses at the door, with the same words.

A token id outside the vocabulary would index past the embedding table, which ends the process on
a GPU; so nothing here is left to the engines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Literal

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import Assignment, Request, SamplingParams

_SMALLEST: Final = 1.2e-38  # of float32, in which engines keep their parameters
_LARGEST: Final = 3.4e38
PromptField = Literal["tokens", "prompt", "messages"]


def prompt_field(request: Request) -> PromptField:
    """Which of the three prompts the request gives."""
    if request.tokens is not None:
        return "tokens"
    return "prompt" if request.prompt is not None else "messages"


def check_prompt(
    field: PromptField, tokens: Sequence[int], vocab_size: int, max_model_len: int
) -> None:
    """Refuse an empty, over-long or out-of-vocabulary prompt; room for one token must be left."""
    if not tokens:
        raise InvalidRequest(field, "has no tokens")
    if len(tokens) >= max_model_len:
        raise InvalidRequest(
            field,
            f"has {len(tokens)} tokens; prompt and output together are at most {max_model_len}",
        )
    _check_ids(field, tokens, vocab_size)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens which do not exist, or numbers that no engine holds."""
    _check_ids("params.stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_ids("params.logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("params.logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    _check_ids("params.trace_decode_token_ids", params.trace_decode_token_ids or (), vocab_size)
    for row in params.prompt_logprob_token_ids or ():
        named = [token for token in row if token >= 0]  # -1 fills up
        _check_ids("params.prompt_logprob_token_ids", named, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequest("params.allowed_token_ids", "is empty, so nothing may be said")
        _check_ids("params.allowed_token_ids", params.allowed_token_ids, vocab_size)
    if not _SMALLEST <= params.repetition_penalty <= _LARGEST:
        raise InvalidRequest("params.repetition_penalty", "must be a float32 above zero")
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    if "" in stops:
        raise InvalidRequest("params.stop", "must not contain an empty string")


def check_resumable(assignment: Assignment) -> None:
    """Refuse to continue several choices where nobody says whose the published tokens are."""
    several = assignment.request.params.n > 1
    if several and len(assignment.choices) * 4 != len(assignment.published):
        raise InvalidRequest("params.n", "nobody knows any more whose published tokens are")


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    if not ids:
        return
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:
        strange = lowest if lowest < 0 else highest
        raise InvalidRequest(
            field, f"token id {strange} is not in the vocabulary (0 to {vocab_size - 1})"
        )
