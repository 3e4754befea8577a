"""Outputs that a small model does not produce: faults, and steps of several tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.engines.harness import ask
from tokenyard.protocol.wire import Assignment, StructuredOutputs
from worker.engines import EngineEvent, Finished, RequestError, TokenDelta
from worker.engines.resume import TextStream
from worker.engines.vllm.branches import Branch
from worker.engines.vllm.collectors import (
    Continued,
    Diverged,
    EngineRequest,
    Repeated,
    Streamed,
    Whole,
)

LETTERS = Tokenizer(models.WordLevel({chr(97 + at): at for at in range(26)}, "a"))
LETTERS.decoder = decoders.Fuse()


def asked(assignment: Assignment) -> EngineRequest:
    return EngineRequest.of(assignment, [0, 1])


def output(
    *tokens: int,
    text: str = "",
    finish_reason: str | None = None,
    index: int = 0,
    cached: int | None = None,
    **more: int,
) -> SimpleNamespace:
    """vLLM's output for one request after one step."""
    part = SimpleNamespace(
        index=index,
        token_ids=list(tokens),
        text=text,
        logprobs=None,
        finish_reason=finish_reason,
        stop_reason=None,
    )
    return SimpleNamespace(
        outputs=[part],
        prompt_logprobs=None,
        finished=finish_reason is not None,
        num_cached_tokens=cached,
        **more,
    )


def take(answer: Streamed | Branch, *outputs: Any) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for one in outputs:
        answer.take(one, events)
    return events


@pytest.mark.parametrize("make", [Whole, Streamed])
@pytest.mark.parametrize(("found", "told"), [(None, None), (0, 0), (1, 1), (9, 2)])
def test_the_prefix_cache_counts_only_prompt_tokens(
    make: Any, found: int | None, told: int | None
) -> None:
    # Given two prompt tokens; vLLM counts published tokens as prompt, and the engine does not
    *_, end = take(make(asked(ask("7-0"))), output(5, finish_reason="stop", cached=found))

    assert isinstance(end, Finished)
    assert (end.cached_tokens, end.created_cache_tokens) == (told, None)


@pytest.mark.parametrize("make", [Whole, Streamed])
@pytest.mark.parametrize(("cached", "new", "told"), [(0, 2, 2), (1, 1, 1), (1, 9, 1), (9, 0, 0)])
def test_what_is_new_in_the_prefix_cache_is_of_the_prompt(
    make: Any, cached: int, new: int, told: int
) -> None:
    step = output(5, finish_reason="stop", cached=cached, num_cache_creation_tokens=new)

    *_, end = take(make(asked(ask("7-0"))), step)

    assert isinstance(end, Finished)
    assert end.created_cache_tokens == told


@pytest.mark.parametrize("make", [Whole, Streamed])
@pytest.mark.parametrize(
    ("params", "reason", "code", "said"),
    [
        ({}, "error", "INFERENCE_ERROR", ""),
        ({}, "abort", "INFERENCE_ERROR", ""),
        # No token meets the constraint.
        (
            {"structured_outputs": StructuredOutputs(regex="1")},
            *("error", "INVALID_REQUEST", "params.structured_outputs: "),
        ),
    ],
    ids=["error", "abort", "constraint"],
)
def test_a_request_that_vllm_gives_up_is_a_fault_of_that_request(
    make: Any, params: dict[str, Any], reason: str, code: str, said: str
) -> None:
    answer = make(asked(ask("7-0", **params)))

    (event,) = take(answer, output(finish_reason=reason))

    assert isinstance(event, RequestError)
    assert (event.key, event.code) == ("7-0", code)
    assert event.message.startswith(said)
    assert answer.is_finished


def test_a_step_across_the_cut_shows_only_new_tokens() -> None:
    answer = Repeated(asked(ask(stream=True, published=[4, 5, 6])))

    events = take(answer, output(4, 5), output(6, 7, 8), output(9, finish_reason="length"))

    delta, finished = events
    assert isinstance(delta, TokenDelta)
    assert delta.tokens == [7, 8]
    assert isinstance(finished, Finished)
    assert finished.choices[0].tokens == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("outputs", "at"),
    [
        ([output(4), output(9)], 1),
        ([output(4, 5, 9)], 2),
        ([output(4, 5, finish_reason="stop")], 2),
    ],
    ids=["another token", "later in the step", "an earlier end"],
)
def test_a_difference_is_noticed_at_its_first_token(outputs: list[Any], at: int) -> None:
    with pytest.raises(Diverged) as diverged:
        take(Repeated(asked(ask(published=[4, 5, 6]))), *outputs)

    assert diverged.value.at == at


def test_tokens_after_a_stop_string_are_dropped() -> None:
    question = asked(ask(published=[0, 1], stop="bcd", detokenize=True))
    answer = Continued(question, TextStream(LETTERS, question.prompt, question.params))

    (finished,) = take(answer, output(2, 3, 4, 5))

    assert answer.is_finished
    assert isinstance(finished, Finished)
    choice = finished.choices[0]
    assert (choice.tokens, choice.text) == ([0, 1, 2, 3], "a")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "bcd")


def test_the_stop_token_is_not_part_of_the_text() -> None:
    question = asked(ask(published=[0], detokenize=True))
    answer = Continued(question, TextStream(LETTERS, question.prompt, question.params))

    (finished,) = take(answer, output(1, 2, finish_reason="stop"))

    assert isinstance(finished, Finished)
    assert (finished.choices[0].tokens, finished.choices[0].text) == ([0, 1, 2], "ab")


def test_each_choice_keeps_its_own_tokens() -> None:
    answer = Streamed(asked(ask(stream=True, n=2)))
    first_ends = output(5, finish_reason="stop", index=0)
    first_ends.finished = False

    events = take(
        answer,
        output(1, index=0),
        output(2, index=1),
        first_ends,
        output(6, finish_reason="length", index=1),
    )

    *deltas, finished = events
    assert [(one.index, one.tokens) for one in deltas if isinstance(one, TokenDelta)] == [
        (0, [1]),
        (1, [2]),
        (0, [5]),
    ]
    assert isinstance(finished, Finished)
    assert [choice.tokens for choice in finished.choices] == [[1, 5], [2, 6]]
    assert [choice.finish_reason for choice in finished.choices] == ["stop", "length"]
