"""Several choices that continue after a crash, from vLLM outputs made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.harness import ask
from tests.unit.engines.test_vllm_collectors import LETTERS, output, take
from tokenyard.protocol.wire import Assignment
from worker.engines import EngineEvent, Finished, RequestError, TokenDelta
from worker.engines.resume import TextStream
from worker.engines.vllm.branches import Branch, Branches, request_of_choice
from worker.engines.vllm.collectors import Continued, Diverged, Repeated
from worker.engines.vllm.request import EngineRequest


def cut(**params: Any) -> Assignment:
    """Of three choices the first has published two tokens, the second one, the third none."""
    named = {"n": 3, "max_tokens": 9, "stream": True} | params
    return ask("7-0", published=[1, 5, 2], choices=b"\0\1\0", **named)


def several(assignment: Assignment) -> tuple[Branches, list[Branch]]:
    asked = EngineRequest.of(assignment, [0, 1])
    branches = Branches()
    made = []
    for index in range(3):
        one = request_of_choice(asked, index)
        text = TextStream(LETTERS, [0, 1], one.params) if one.params.detokenize else None
        made.append(Branch(branches, index, Continued(one, text)))
    return branches, made


def deltas(events: list[EngineEvent]) -> list[tuple[int, list[int]]]:
    return [(one.index, list(one.tokens)) for one in events if isinstance(one, TokenDelta)]


def test_each_choice_knows_its_own_published_tokens() -> None:
    asked = EngineRequest.of(cut(), [0, 1])

    assert asked.by_choice == ([1, 2], [5], [])
    assert [request_of_choice(asked, index).published for index in range(3)] == [[1, 2], [5], []]
    assert {request_of_choice(asked, index).params.n for index in range(3)} == {1}


def test_choices_have_their_own_index_and_end_together() -> None:
    branches, (one, two, three) = several(cut())
    assert [each.request_id for each in (one, two, three)] == ["7-0#0", "7-0#1", "7-0#2"]

    assert deltas(take(three, output(9))) == [(2, [9])]
    assert deltas(take(one, output(3))) == [(0, [3])]
    # One that ends before the others yields its last tokens as a delta,
    assert deltas(take(two, output(6), output(7, finish_reason="stop"))) == [(1, [6]), (1, [7])]
    assert not branches.is_over
    assert deltas(take(three, output(8, finish_reason="length"))) == [(2, [8])]
    # and the last one ends all.
    (end,) = take(one, output(4, finish_reason="length"))

    assert isinstance(end, Finished)
    assert end.key == "7-0"
    assert [choice.index for choice in end.choices] == [0, 1, 2]
    assert [choice.tokens for choice in end.choices] == [[1, 2, 3, 4], [5, 6, 7], [9, 8]]
    assert [choice.finish_reason for choice in end.choices] == ["length", "stop", "length"]
    assert branches.is_over


def test_a_choice_that_cannot_continue_ends_all() -> None:
    branches, (one, _, _) = several(cut())

    (fault,) = take(one, output(3, finish_reason="error"))

    assert isinstance(fault, RequestError)
    assert fault.key == "7-0"
    assert branches.is_over


def test_the_output_so_far_has_the_tokens_of_all_choices() -> None:
    _, (one, two, _) = several(cut())
    take(two, output(6))

    made = one.so_far()

    assert [choice.tokens for choice in made.choices] == [[1, 2], [5, 6], []]
    assert {choice.finish_reason for choice in made.choices} == {"abort"}


def test_text_that_ends_early_is_completed() -> None:
    _, (one, two, three) = several(cut(detokenize=True))
    shown = [delta.text for delta in take(two, output(6), output(7, finish_reason="length"))]  # type: ignore[union-attr]
    take(three, output(9, finish_reason="length"))
    (end,) = take(one, output(3, finish_reason="length"))

    assert shown == ["g", "h"]
    assert isinstance(end, Finished)
    assert [choice.text for choice in end.choices] == ["bcd", "fgh", "j"]


def test_a_choice_that_a_stop_string_ended_is_recognized_by_its_text() -> None:
    assignment = ask(
        "7-0", published=[1, 5, 2], choices=b"\0\1\0", n=2, stop=["c"], detokenize=True, stream=True
    )
    asked = EngineRequest.of(assignment, [0, 1])

    stopped = []
    for index in range(2):
        one = request_of_choice(asked, index)
        stopped.append(Continued(one, TextStream(LETTERS, [0, 1], one.params)).stopped)

    assert stopped == ["c", None]


def step(*parts: tuple[int, list[int], str | None]) -> SimpleNamespace:
    """One step of all choices, given as (index, tokens, finish reason)."""
    made = [
        output(*tokens, index=index, finish_reason=why).outputs[0] for index, tokens, why in parts
    ]
    ended = all(why for _, _, why in parts)
    return SimpleNamespace(
        outputs=made, prompt_logprobs=None, finished=ended, num_cached_tokens=None
    )


def repeated() -> Repeated:
    asked = EngineRequest.of(cut(seed=1), [0, 1])
    assert isinstance(asked, EngineRequest)
    return Repeated(asked)


def test_a_repeated_run_shows_only_the_unseen_tokens_of_each_choice() -> None:
    answer, events = repeated(), list[EngineEvent]()

    for made in (
        step((0, [1], None), (1, [5], None), (2, [9], None)),
        step((0, [2], None), (1, [6], None), (2, [8], None)),
        step((0, [3], None), (1, [7], None), (2, [7], None)),
    ):
        answer.take(made, events)

    assert deltas(events) == [(2, [9]), (1, [6]), (2, [8]), (0, [3]), (1, [7]), (2, [7])]


def test_a_choice_that_differs_hides_its_step_and_keeps_all_tokens() -> None:
    answer, events = repeated(), list[EngineEvent]()
    answer.take(step((0, [1], None), (1, [5], None), (2, [9], None)), events)

    with pytest.raises(Diverged):
        answer.take(step((2, [8], None), (1, [6], None), (0, [4], None)), events)

    assert deltas(events) == [(2, [9])]
    assert answer.shown == ([1, 2], [5], [9])
