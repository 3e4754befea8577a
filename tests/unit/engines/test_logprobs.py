"""Logprobs in the wire's form, from invented positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tokenyard.protocol.wire import SamplingParams
from worker.engines.logprobs import FLOOR, Wanted, most, token_entry, wanted, with_scores


@dataclass
class Seen:
    """vLLM's logprob of one token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


POSITION: Any = {9: Seen(-1.0, 2), 5: Seen(-0.5, 1), 7: Seen(float("-inf"), 3)}


def test_the_requested_number_of_logprobs_is_returned() -> None:
    assert wanted(SamplingParams()) is None
    assert wanted(SamplingParams(logprobs=0)) == Wanted(0)
    assert wanted(SamplingParams(logprob_token_ids=[7, 5])) == Wanted(2, (7, 5))


def test_named_tokens_keep_their_order() -> None:
    found = token_entry(9, POSITION, Wanted(2, (7, 5)))

    assert [(one["token"], one["logprob"], one["rank"]) for one in found["top"]] == [
        (7, FLOOR, None),
        (5, -0.5, None),
    ]


def test_a_whole_vocabulary_is_ranked_here() -> None:
    by_ids: Any = {5: Seen(-3.0, 1), 9: Seen(-1.0, 2)}

    found = token_entry(9, by_ids, Wanted(-1))

    assert found["rank"] == 1
    assert [(one["token"], one["rank"]) for one in found["top"]] == [(9, 1), (5, 2)]


@pytest.mark.parametrize(("counts", "expected"), [((3, 5), 5), ((-1, 5), -1), ((0, -1), -1)])
def test_all_is_more_than_any_number(counts: tuple[int, ...], expected: int) -> None:
    assert most(*counts) == expected


def test_scores_are_at_their_prompt_tokens() -> None:
    asked = SamplingParams(prompt_logprob_token_ids=[[3, 4], [5, -1]], prompt_logprob_start=1)
    scores = [[-1.0, float("-inf")], [-2.0, float("-inf")]]

    found = with_scores([10, 11, 12, 13], None, asked, scores)

    assert found[:2] == [None, None]
    assert [one and (one["token"], one["logprob"], one["scores"]) for one in found[2:]] == [
        (12, None, [{"token": 3, "logprob": -1.0}, {"token": 4, "logprob": FLOOR}]),
        (13, None, [{"token": 5, "logprob": -2.0}]),
    ]


def test_scores_are_added_to_other_requested_logprobs() -> None:
    asked = SamplingParams(prompt_logprob_token_ids=[[3]])

    found = with_scores([10, 11], [None, {"token": 11, "logprob": -4.0}], asked, [[-1.0]])

    assert found[1] == {"token": 11, "logprob": -4.0, "scores": [{"token": 3, "logprob": -1.0}]}
