"""How the benchmarks of warm workers evaluate their times."""

from __future__ import annotations

import pytest

from benchmarks.cold_start.__main__ import medians, summary
from benchmarks.cold_start.case import Task, Timed, WrongAnswer, phases
from benchmarks.sums import ADDER, SUBTRACTOR, questions
from worker.models import ModelSpec


def test_questions_take_turns_and_have_the_right_answers() -> None:
    asked = questions([ADDER, SUBTRACTOR], 6)
    assert [one.model for one in asked] == [ADDER, SUBTRACTOR] * 3
    for one in asked:
        assert eval(one.prompt.rstrip("=")) == int(one.answer)


def test_phases_are_the_times_between_their_ends() -> None:
    assert phases(10.0, {"import": 12.0, "weights": 12.5}) == {"import": 2.0, "weights": 0.5}


def test_time_outside_all_phases_is_the_rest() -> None:
    timed = Timed(3.0, {"config": 1.0, "weights": 1.5}).with_rest("pool")
    assert timed.phases_s["pool"] == pytest.approx(0.5)


def test_figures_are_medians_and_null_where_nothing_ran() -> None:
    # Given three rounds on a CPU
    parts = ("serve_cold", "llm_cold", "paid_before", "warm_create", "swap", "wake_cpu")
    rounds = [
        {part: Timed(seconds, {"config": seconds}) for part in (*parts, "request_cold")}
        for seconds in (1.0, 5.0, 2.0)
    ]
    figures = summary(medians(rounds))
    # I expect the middle one, no figure for a GPU, and only promised figures
    assert figures["serve_cold"] == 2.0
    assert figures["wake"] is None
    assert figures["wake_cpu"] == 2.0
    assert "paid_before" not in figures
    assert medians(rounds)["swap"].phases_s == {"config": 2.0}


def test_a_wrong_answer_ends_the_run() -> None:
    task = Task(ModelSpec(name=ADDER, path="adder"), "12+34=", "46")
    task.check("create", "46")
    with pytest.raises(WrongAnswer, match="was answered '47', not '46'"):
        task.check("create", "47")
