"""`tokenyard demo`: real answers, counted, and no leftovers."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.cli.running import Ask, Command, tokenyard
from tests.support.processes import is_gone
from tests.support.waiting import eventually
from tokenyard.cli import demo
from tokenyard.cli.demo import DemoAnswer, Sum
from tokenyard.cli.up.local_yard import LocalPlan
from tokenyard.process import extras
from tokenyard.process.program import Exit
from tokenyard.protocol.replies import ErrorInfo, Provenance, Result, Status, Timing
from tokenyard.protocol.texts import pip_install


def answer(text: str, *, status: Status = "completed") -> DemoAnswer:
    return DemoAnswer(
        Sum("12+34=", "46"),
        Result(
            id="q",
            status=status,
            tokens=[],
            text=text,
            error=None if status == "completed" else ErrorInfo("POISONED", "it bites"),
            provenance=Provenance("adder", "", "vllm", "0", "demo-0.1", 1),
            timing=Timing(queue_ms=2, engine_ms=3.4),
        ),
    )


def test_sums_are_right_and_reproducible() -> None:
    sums = demo.sums(50)
    assert sums == demo.sums(50)
    for each in sums:
        left, right = each.prompt.rstrip("=").split("+")
        assert 10 <= int(left) <= 99
        assert 10 <= int(right) <= 99
        assert int(left) + int(right) == int(each.answer)


@pytest.mark.parametrize(
    ("given", "is_correct", "text"),
    [
        (answer("46"), True, "46"),
        (answer(" 46\n"), True, "46"),
        (answer("47"), False, "47"),
        (answer("46", status="failed"), False, "failed: it bites"),
    ],
)
def test_only_a_completed_equal_answer_is_correct(
    given: DemoAnswer, is_correct: bool, text: str
) -> None:
    assert given.is_correct is is_correct
    assert given.text == text


def test_a_full_table_still_shows_wrong_answers() -> None:
    console = Console(width=100)
    answers = [answer("46"), answer("46"), answer("99")]
    with console.capture() as captured:
        console.print(demo._table(answers, rows=1))
    rows = [line for line in captured.get().splitlines() if "12+34=" in line]
    assert ["99" in row for row in rows] == [True, False]
    assert all("demo-0.1" in row and "5 ms" in row for row in rows)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> str:
    """What is to be said."""
    for module in (demo, extras):
        monkeypatch.setattr(module, "installed_vllm", lambda: None)
    return f"{demo._INVENTED}: {pip_install('worker-cpu')}, or [worker].\n"


def test_without_vllm_the_demo_is_planned_with_a_simulated_engine(
    without_vllm: str, invoke: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[LocalPlan] = []

    def run(plan: LocalPlan, _: object, __: str, questions: list[Sum]) -> list[DemoAnswer]:
        plans.append(plan)
        return [DemoAnswer(one, answer("a7").result) for one in questions]

    monkeypatch.setattr(demo, "_run", run)
    done = invoke("demo", "--slots", "3", "--requests", "5")
    assert done.exit_code == Exit.OK
    assert done.output.startswith(without_vllm)
    assert done.output.splitlines()[-1] == "5 answered, all invented"
    [plan] = plans
    assert (plan.worker.engine, plan.worker.slots, plan.has_gateway) == ("simulated", 3, False)


@pytest.mark.long
def test_without_vllm_the_demo_runs(without_vllm: str, invoke: Ask) -> None:
    done = invoke("demo", "--requests", "20")
    assert done.exit_code == Exit.OK, done.output
    assert without_vllm in done.output
    assert "vLLM worker" not in done.output
    assert done.output.splitlines()[-1] == "20 answered, all invented"


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_the_demo_answers_every_sum_right() -> None:
    done = tokenyard("demo", "--requests", "30", "--rows", "30", timeout_s=360)
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "30 answered, 30 correct"
    for each in demo.sums(30):
        assert each.prompt in done.stdout
    assert "Everything is stopped." in done.stdout


@pytest.mark.vllm
@pytest.mark.long
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    with Command(tmp_path / "log", "demo") as running:
        eventually(lambda: "0 of 2 workers" in running.said, timeout_s=60)
        children = psutil.Process(running.process.pid).children(recursive=True)
        family = [child.pid for child in children]
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == Exit.INTERRUPTED
    assert family
    eventually(lambda: all(map(is_gone, family)))
    assert "Everything is stopped." in running.said
