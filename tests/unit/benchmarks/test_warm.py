"""How the benchmarks of warm workers evaluate their times."""

from __future__ import annotations

import pytest

from benchmarks.alternate import Report, faults, swaps_s
from benchmarks.cold_start.__main__ import medians, summary
from benchmarks.cold_start.case import Task, Timed, WrongAnswer, phases
from benchmarks.cycles import summary as cycles_summary
from benchmarks.cycles_child import Cycle
from benchmarks.sums import ADDER, SUBTRACTOR, questions
from tokenyard.protocol.commands import Command, Verb
from worker.engines import Memory
from worker.host.leak import READINGS
from worker.models import ModelSpec


def command(model: str, verb: Verb = "load") -> Command:
    return Command(verb=verb, worker="w.1", model=model)


def report(
    *, wrong: int = 0, swaps: int = 1, closest_s: float | None = 2.0, lost: float | None = 0.01
) -> Report:
    return Report(100.0, 80.0, 0.8, swaps, 500, closest_s, 0.2, lost, wrong)


def test_a_swap_is_a_load_of_another_model_than_the_last() -> None:
    # Given the first load, a repeated one, other commands, and two changes
    commands = [
        (1_000, command("a")),
        (1_500, command("a")),
        (2_000, command("a", "reset")),
        (4_000, command("b")),
        (9_000, command("a")),
    ]
    # I expect only the times of the changes
    assert swaps_s(commands) == [4.0, 9.0]


def test_wrong_answers_and_swaps_that_are_too_close_are_faults() -> None:
    reports = {
        "good": report(),
        "wrong": report(wrong=3),
        "close": report(closest_s=1.9),
        "without swaps": report(swaps=0),
        "only one": report(closest_s=None, lost=None),
    }
    told = [line.split(":")[0] for line in faults(reports, 2.0, targets=False)]
    assert told == ["wrong", "close", "without swaps", "only one"]


def test_swaps_with_waits_from_their_cost_may_take_a_tenth_of_the_time() -> None:
    reports = {
        "good": report(closest_s=2.0, lost=0.09),
        "much": report(closest_s=2.0, lost=0.11),
        "close": report(closest_s=0.9, lost=0.01),
    }
    told = [line.split(":")[0] for line in faults(reports, 0.0, targets=True)]
    assert told == ["much", "close"]
    assert not faults({"asked for": reports["much"]}, 2.0, targets=True)
    assert not faults({"quick run": reports["much"]}, 0.0, targets=False)


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


def test_kept_memory_is_compared_with_that_before_the_first_model() -> None:
    warm, loaded = Memory(host=1000), Memory(host=1500)
    cycles = [
        Cycle(1.0, 0, warm, loaded, Memory(host=1050)),
        Cycle(1.0, 1, warm, loaded, None),  # replaced
        Cycle(1.0, 0, warm, loaded, Memory(host=1010)),
    ]
    figures = cycles_summary(cycles)
    assert figures["kept_percent_most"] == 5.0
    assert figures["kept_percent_last"] == 1.0
    assert figures["replaced"] == figures["leaks"] == 1
    assert figures["wrong_answers"] == 1


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (20, 2)])
def test_steadily_growing_memory_is_a_leak_of_the_benchmark_too(step: int, expected: int) -> None:
    # Given a process that is never replaced, whatever it keeps
    mib = 1024**2
    memory = [Memory(host=(620 + at * step) * mib) for at in range(2 * READINGS)]
    cycles = [Cycle(1.0, 0, Memory(host=590 * mib), memory[0], one) for one in memory]

    assert cycles_summary(cycles)["leaks"] == expected
