"""How `benchmarks/serving` evaluates answers and times; its quick run tests the engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from benchmarks.cold_start.case import WrongAnswer
from benchmarks.serving.__main__ import SIDES, STREAMED, Report, summary
from benchmarks.serving.case import Load, Outcome, Stream, Task, Workload, poisson
from benchmarks.serving.load import put_load
from benchmarks.serving.sides import Side
from benchmarks.serving.stage import Stage
from worker.models import ModelSpec

TASKS = [Task([1, 2], [3, 4, 5], 3), Task([6], [7], 1)]


class Echo:
    """Gives the prepared answers, one token at a time."""

    def __init__(self, answers: Sequence[list[int]]) -> None:
        self._answers = list(answers)

    async def ask(self, tasks: Sequence[Task]) -> list[AsyncIterator[list[int]]]:
        return [self._answer(self._answers.pop(0)) for _ in tasks]

    async def _answer(self, tokens: list[int]) -> AsyncIterator[list[int]]:
        for token in tokens:
            yield [token]


def put(answers: Sequence[list[int]], arrivals_s: Sequence[float] = ()) -> Outcome:
    return asyncio.run(put_load(Echo(answers), Load(TASKS, True, arrivals_s)))


@pytest.mark.parametrize("arrivals_s", [(), (0.0, 0.001)])
def test_right_answers_are_counted(arrivals_s: Sequence[float]) -> None:
    outcome = put([[3, 4, 5], [7]], arrivals_s)
    assert not outcome.faults
    assert (outcome.tokens, outcome.requests) == (4, 2)
    assert (len(outcome.ttft_ms), len(outcome.itl_ms)) == (2, 2)


@pytest.mark.parametrize("second", [[], [8], [7, 7]])
def test_a_wrong_answer_ends_the_run(second: list[int]) -> None:
    workload = Workload("long", "", ModelSpec("m", "/m"), 3, True)
    side = Side(lambda _: put([[3, 4, 5], second]), [])
    stage = Stage(workload, TASKS, {"tokenyard": side})
    with pytest.raises(WrongAnswer, match="1 wrong"):
        stage.put("tokenyard", stage.load(2, streams=True))


def test_tokens_that_arrive_together_have_no_time_between_them() -> None:
    stream = Stream(0.0)
    stream.note([1], 1.0)
    stream.note([2, 3], 1.5)
    stream.note([], 1.7)
    assert stream.gaps_ms() == [500.0, 0.0]


def test_all_sides_get_the_same_arrivals() -> None:
    assert poisson(5, 10.0, 6) == poisson(5, 10.0, 6) == sorted(poisson(5, 10.0, 6))


def test_figures_follow_from_the_outcomes() -> None:
    outcome = Outcome(1.0, 4, 2, (), [1.0, 2.0], [0.5, 0.5], 0.1)
    rounds = [dict.fromkeys(SIDES, outcome)]
    figures = summary({"": Report(rounds, 5.0, [dict.fromkeys(STREAMED, outcome)])})
    assert figures["tokens_per_s"] == 4.0
    assert figures["cpu_us_per_token"] == 25_000.0
