"""Log probabilities as they travel: plain JSON, one entry per token.

    {"token": 9, "logprob": -0.02, "rank": 1, "decoded": "7", "top": [
        {"token": 9, "logprob": -0.02, "rank": 1, "decoded": "7"},
        {"token": 5, "logprob": -4.10, "rank": 2, "decoded": "3"}]}

``token`` is the one that was sampled (or stands in the prompt), ``rank`` its place among all
tokens, ``decoded`` its text where the engine detokenizes, and ``top`` the ``logprobs`` likeliest
tokens, likeliest first. Natural logarithms, before temperature and penalties (vLLM's
``raw_logprobs``). A prompt's first token has no probability: its entry is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.logprobs import Logprob

FLOOR: Final = -9999.0  # stands for minus infinity, which JSON has not; as in vLLM's server


def entry(token: int, position: Mapping[int, Logprob], top: int) -> dict[str, Any]:
    """What vLLM says of one position, as an entry; ``top`` is how many were asked for."""
    likeliest = sorted(
        (one for one in position.items() if one[1].rank is not None and one[1].rank <= top),
        key=lambda one: one[1].rank or 0,
    )
    return _plain(token, position[token]) | {"top": [_plain(*one) for one in likeliest]}


def entries(
    tokens: Iterable[int], positions: Iterable[Mapping[int, Logprob]], top: int
) -> list[dict[str, Any]]:
    """Entries of sampled tokens."""
    return [entry(token, position, top) for token, position in zip(tokens, positions, strict=True)]


def prompt_entries(
    tokens: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None], top: int
) -> list[dict[str, Any] | None]:
    """Entries of prompt tokens."""
    return [
        None if position is None else entry(token, position, top)
        for token, position in zip(tokens, positions, strict=True)
    ]


def _plain(token: int, one: Logprob) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": max(one.logprob, FLOOR),
        "rank": one.rank,
        "decoded": one.decoded_token,
    }
