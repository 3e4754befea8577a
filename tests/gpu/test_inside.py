"""CUDA graphs, compiled code for the next load, and results that are equal between runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Figures, Occupant
from tests.gpu.device import Device
from tests.gpu.specs import bounded
from tests.support.processes import ROOT

#: Seconds: a first load on a GPU compiles and captures graphs.
WITHIN_S = 200.0
pytestmark = bounded(WITHIN_S + 40)
#: Log messages of a load without compiled code, and of one with it.
COMPILED = ("num_aot_artifacts_saved", "num_compiled_artifacts_saved", "num_inductor_compiles")
FOUND = ("num_aot_artifacts_loaded", "num_compiled_artifacts_loaded")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(occupant: Occupant, device: Device, models: Path) -> Ask:
    """Run a part of `tests.gpu.inside`, alone on the device."""

    def run(part: str, **environment: str) -> dict[str, Any]:
        occupant.leave()
        command = [sys.executable, "-m", "tests.gpu.inside", part, device.name, str(models)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=device.patience * WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-2500:]}"
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return run


@pytest.fixture(scope="module")
def found(ask: Ask, device: Device, figures: Figures) -> dict[str, Any]:
    """The findings of one process."""
    # A CPU traces, but does not compile for minutes.
    environment = {} if device.is_gpu else {"VLLM_CPU_CI_ENV": "1"}
    answer = ask("graphs", **environment)
    figures.note("batches", answer["batches"])
    figures.note("graphs", answer["lives"])
    return answer


@pytest.fixture
def lives(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The findings for the same model twice, another one, and the first again, in one process."""
    lives: list[dict[str, Any]] = found["lives"]
    for number, life in enumerate(lives):
        if "fault" in life:
            pytest.fail(f"life {number}: {life['fault']}", pytrace=False)
    return lives


def counts(life: dict[str, Any], names: tuple[str, ...]) -> int:
    return sum(life["counters"].get(name, 0) for name in names)


def test_models_with_graphs_come_and_go_in_one_process(lives: list[dict[str, Any]]) -> None:
    assert [life["is_right"] for life in lives] == [True] * 4


def test_each_load_captures_its_graphs(lives: list[dict[str, Any]], device: Device) -> None:
    if not device.is_gpu:
        pytest.skip("a CPU has no CUDA graphs")
    captured = [counts(life, ("num_cudagraph_captured",)) for life in lives]

    assert captured[0] > 0
    assert captured == captured[:1] * 4


def test_a_second_load_finds_the_code_that_the_first_compiled(
    lives: list[dict[str, Any]], device: Device
) -> None:
    if not device.is_gpu:
        pytest.skip("vLLM's CPU backend has no cache of what it compiles")
    first, second, other, third = lives

    assert first["new_files"] > 0
    assert other["new_files"] > 0
    assert counts(first, COMPILED) > 0
    for again in (second, third):
        assert again["new_files"] == 0
        assert counts(again, COMPILED) == 0
        assert counts(again, FOUND) > 0


def test_graphs_leave_no_memory_behind(lives: list[dict[str, Any]], device: Device) -> None:
    """Compares the second life of a model with its third: the first may load kernels."""
    _, second, _, third = lives

    assert (third["used_mib"] - second["used_mib"]) << 20 < device.slack
    assert (third["reserved_mib"] - second["reserved_mib"]) * 2**20 < device.slack


def test_a_prompt_alone_gets_the_same_answer_each_time(found: dict[str, Any]) -> None:
    """Nothing else is promised: a batch of another size may round differently."""
    batches = found["batches"]

    assert batches.get("alone_equal_alone") == batches.get("prompts", -1), batches


def test_batch_invariance_is_measured(ask: Ask, device: Device, figures: Figures) -> None:
    """With VLLM_BATCH_INVARIANT, beta in vLLM: differences between batches are only recorded.

    On an H100 vLLM 0.26 gave 63 of 64 prompts the same tokens alone and in a batch.
    """
    if not device.is_gpu:
        pytest.skip("vLLM's CPU backend promises no batch invariance")
    found = ask("batches", VLLM_BATCH_INVARIANT="1")

    figures.note("batches_invariant_cold", found)
    assert found["alone_equal_alone"] == found["prompts"]
