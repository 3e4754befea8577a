"""Log probabilities in plain JSON, one entry per token.

    {"token": 9, "logprob": -0.02, "rank": 1, "decoded": "7", "top": [
        {"token": 9, "logprob": -0.02, "rank": 1, "decoded": "7"},
        {"token": 5, "logprob": -4.10, "rank": 2, "decoded": "3"}]}

``token`` is the sampled token (or the token of the prompt), ``rank`` its place among all tokens,
``decoded`` its text if the engine detokenizes, and ``top`` the ``logprobs`` likeliest tokens,
likeliest first. Values are natural logarithms, before temperature and penalties (vLLM's
``raw_logprobs``). A prompt's first token has no probability: its entry is null. If the request
names token ids, ``top`` has these in their order, with ranks of null. If the request names ids to
score for a prompt token, its entry has ``scores``: ``token`` and ``logprob`` of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.logprobs import Logprob

    from tokenyard.protocol.wire import SamplingParams

FLOOR: Final = -9999.0  # in place of minus infinity, which JSON lacks; as in vLLM's server


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tokens in ``top`` of an entry: the ``top`` likeliest (-1: all), or ``ids``."""

    top: int
    ids: tuple[int, ...] = ()

    def pick(self, position: Mapping[int, Logprob]) -> list[dict[str, Any]]:
        """The wanted tokens of one position."""
        if self.ids:
            found = [_plain(token, position[token]) for token in self.ids if token in position]
            return [{**one, "rank": None} for one in found]  # vLLM's rank is their order
        if self.top < 0:
            ranked = sorted(position.items(), key=lambda one: -one[1].logprob)
            return [_plain(*one) | {"rank": rank} for rank, one in enumerate(ranked, 1)]
        likeliest = sorted(
            (
                one
                for one in position.items()
                if one[1].rank is not None and one[1].rank <= self.top
            ),
            key=lambda one: one[1].rank or 0,
        )
        return [_plain(*one) for one in likeliest]


def wanted(params: SamplingParams) -> Wanted | None:
    """The logprobs that a request wants of its sampled tokens, or None."""
    if params.logprob_token_ids:
        return Wanted(len(params.logprob_token_ids), tuple(params.logprob_token_ids))
    return None if params.logprobs is None else Wanted(params.logprobs)


def most(*counts: int) -> int:
    """The largest of several numbers of logprobs, where -1 means all."""
    return -1 if -1 in counts else max(counts)


def token_entry(token: int, position: Mapping[int, Logprob], asked: Wanted) -> dict[str, Any]:
    """The entry of one position from vLLM's logprobs."""
    top = asked.pick(position)
    found = _plain(token, position[token])
    if asked.top < 0:  # vLLM's ranks of a whole vocabulary follow the ids
        found["rank"] = next(one["rank"] for one in top if one["token"] == token)
    return found | {"top": top}


def token_entries(
    tokens: Iterable[int], positions: Iterable[Mapping[int, Logprob]], asked: Wanted
) -> list[dict[str, Any]]:
    """The entry of each sampled token, from vLLM's logprobs of its position."""
    return [
        token_entry(token, position, asked)
        for token, position in zip(tokens, positions, strict=True)
    ]


def prompt_entries(
    tokens: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None], asked: Wanted
) -> list[dict[str, Any] | None]:
    """Entries of prompt tokens."""
    return [
        None if position is None else token_entry(token, position, asked)
        for token, position in zip(tokens, positions, strict=True)
    ]


def with_scores(
    tokens: Sequence[int],
    known: Sequence[dict[str, Any] | None] | None,
    params: SamplingParams,
    scores: Iterable[Iterable[float]],
) -> list[dict[str, Any] | None]:
    """Entries of prompt tokens with the scores of the ids in ``params``."""
    out: list[dict[str, Any] | None] = list(known) if known else [None for _ in tokens]
    first = (params.prompt_logprob_start or 0) + 1
    rows = zip(params.prompt_logprob_token_ids or (), scores, strict=False)
    for at, (ids, row) in enumerate(rows, first):
        named = [(token, score) for token, score in zip(ids, row, strict=False) if token >= 0]
        found = [{"token": token, "logprob": max(float(one), FLOOR)} for token, one in named]
        out[at] = {**(out[at] or unknown(tokens[at])), "scores": found}
    return out


def unknown(token: int) -> dict[str, Any]:
    """The entry of a token of which no probability is known."""
    return {"token": token, "logprob": None, "rank": None, "decoded": None, "top": []}


def _plain(token: int, one: Logprob) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": max(one.logprob, FLOOR),
        "rank": one.rank,
        "decoded": one.decoded_token,
    }
