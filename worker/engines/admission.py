"""Checks that every engine applies to new requests, with the same error messages.

The engines do not do this: a token id outside the vocabulary would index past the embedding table,
which ends the process on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import Assignment, SamplingParams, Task

_SMALLEST: Final = 1.2e-38  # limits of float32, the type of parameters in engines
_LARGEST: Final = 3.4e38


def check_prompt(field: str, tokens: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raise `InvalidRequest` for an empty, too long or out-of-vocabulary prompt.

    There must be room for at least one output token.
    """
    if not tokens:
        raise InvalidRequest(field, "has no tokens")
    if len(tokens) >= max_model_len:
        raise InvalidRequest(
            field,
            f"has {len(tokens)} tokens; prompt and output together are at most {max_model_len}",
        )
    check_ids(field, tokens, vocab_size)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequest` for token ids outside the vocabulary and numbers out of range."""
    for name in ("stop_token_ids", "logit_bias", "logprob_token_ids", "trace_decode_token_ids"):
        check_ids(f"params.{name}", getattr(params, name) or (), vocab_size)
    for row in params.prompt_logprob_token_ids or ():
        named = [token for token in row if token >= 0]  # -1 is padding
        check_ids("params.prompt_logprob_token_ids", named, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequest("params.allowed_token_ids", "is empty, so nothing may be said")
        check_ids("params.allowed_token_ids", params.allowed_token_ids, vocab_size)
    if not _SMALLEST <= params.repetition_penalty <= _LARGEST:
        raise InvalidRequest("params.repetition_penalty", "must be a float32 above zero")
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    if "" in stops:
        raise InvalidRequest("params.stop", "must not contain an empty string")


def check_task(task: Task, model: str, tasks: Sequence[Task]) -> None:
    """Raise `InvalidRequest` for a task that is none of those of the model."""
    if task not in tasks:
        raise InvalidRequest("task", f"{model} does {', '.join(tasks)}, not {task}")


def check_resumable(assignment: Assignment) -> None:
    """Raise `InvalidRequest` if the published tokens of several choices cannot be told apart."""
    several = assignment.request.params.n > 1
    if several and len(assignment.choices) * 4 != len(assignment.published):
        raise InvalidRequest("params.n", "nobody knows any more whose published tokens are")


def check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise `InvalidRequest` for an id outside the vocabulary."""
    if not ids:
        return
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:
        strange = lowest if lowest < 0 else highest
        raise InvalidRequest(
            field, f"token id {strange} is not in the vocabulary (0 to {vocab_size - 1})"
        )
