"""A program's own engines with real vLLM; each program is a new process, as its pool requires."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines.harness import MODELS, run_program

pytestmark = [pytest.mark.vllm]

#: Writes its results to the given file: vLLM prints on stdout.
PROGRAM = """
import json, os, signal, sys
from dataclasses import replace
from pathlib import Path
from tokenyard.protocol.errors import EngineLost, LoadFailed
from worker import WorkerController
from worker.models import read_models

GREEDY = {"temperature": 0, "max_tokens": 8}

def texts(engine, prompts, **params):
    return [result.text for result in engine.generate(prompts, **GREEDY, **params)]

def again_and_again(engine, prompt):
    while True:
        try:
            return texts(engine, prompt)
        except EngineLost:
            pass

def main():
    seen = {}
    models = read_models(Path(sys.argv[1]))
    with WorkerController(models, timeout_s=100.0, leak_tolerance=1.0) as controller:
        controller.wait_warm()
        seen["warm"] = [one.pid for one in controller.status()]
        with controller.create("adder") as adder:
            sums = [(a, b) for a in range(10, 100, 9) for b in range(10, 100, 9)]
            seen["sums"] = [[a + b for a, b in sums], texts(adder, [f"{a}+{b}=" for a, b in sums])]
            seen["adapter"] = texts(adder, ["75-48=", "27-48="], model="adder-subtracts")
            *pieces, result = adder.stream("27+48=", logprobs=1, **GREEDY)
            seen["stream"] = [[piece.text for piece in pieces], result.text]
            seen["logprobs"] = [len(piece.logprobs) == len(piece.tokens) for piece in pieces]
            (failed,) = adder.generate("1" * 100)
            seen["too long"] = [failed.status, failed.error.code]
            adder.sleep()
            seen["asleep"] = [one.state for one in controller.status()]
            adder.wake()
            seen["awake"] = texts(adder, "12+34=")
            seen["phases"] = list(adder.phases_s)
        seen["unloaded"] = [[one.state, one.pid] for one in controller.status()]
        try:
            controller.create(replace(models["adder"], path=str(Path.cwd())))
        except LoadFailed as fault:
            seen["broken"] = str(fault)
        seen["unbroken"] = [[one.state, one.pid] for one in controller.status()]
        subtractor = controller.create("subtractor")
        seen["swapped"] = [texts(subtractor, "75-48="), subtractor.info.engine]
        os.kill(controller.status()[0].pid, signal.SIGKILL)
        seen["killed"] = again_and_again(subtractor, "75-48=")
        seen["next"] = [[one.state, one.model, one.pid] for one in controller.status()]
    Path(sys.argv[2]).write_text(json.dumps(seen))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the program."""
    folder = tmp_path_factory.mktemp("local")
    report = folder / "report.json"
    run_program(PROGRAM, folder, str(MODELS.parent / "models.toml"), str(report))
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_every_answer_is_right(seen: dict[str, Any]) -> None:
    right, answers = seen["sums"]
    assert [int(answer) for answer in answers] == right


def test_an_adapter_answers_for_its_model(seen: dict[str, Any]) -> None:
    assert seen["adapter"] == ["27", "-21"]


def test_pieces_of_a_stream_make_the_whole_answer(seen: dict[str, Any]) -> None:
    pieces, whole = seen["stream"]
    assert "".join(pieces) == whole == "75"
    assert len(pieces) > 1
    assert all(seen["logprobs"])


def test_an_over_long_prompt_fails_alone(seen: dict[str, Any]) -> None:
    assert seen["too long"] == ["failed", "INVALID_REQUEST"]


def test_a_model_sleeps_and_wakes(seen: dict[str, Any]) -> None:
    assert seen["asleep"] == ["asleep"]
    assert (seen["awake"], seen["phases"]) == (["46"], ["wake"])


def test_the_process_outlives_its_models(seen: dict[str, Any]) -> None:
    (warm,) = seen["warm"]
    assert seen["unloaded"] == seen["unbroken"] == [["warm", warm]]
    assert seen["swapped"] == [["27"], "vllm"]


def test_a_model_that_cannot_be_loaded_fails_with_the_reason(seen: dict[str, Any]) -> None:
    assert "config.json" in seen["broken"]


def test_a_process_that_dies_is_replaced(seen: dict[str, Any]) -> None:
    assert seen["killed"] == ["27"]
    ((state, model, pid),) = seen["next"]
    assert (state, model) == ("ready", "subtractor")
    assert pid not in seen["warm"]
