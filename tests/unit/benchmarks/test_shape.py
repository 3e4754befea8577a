"""How `benchmarks/serving --shape` and `cold_start.py` evaluate sides, times and failures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cold_start import rounds as cold_rounds
from benchmarks.cold_start.__main__ import report
from benchmarks.cold_start.case import MODELS, Timed
from benchmarks.llama import SHAPES, shrunken
from benchmarks.serving import shape as serving_shape
from benchmarks.serving.case import ANSWER_TOKENS, Load, Outcome, Workload
from benchmarks.serving.figures import BROKER, RATIOS, summary
from benchmarks.serving.shape import Found, Plan, measure
from benchmarks.serving.sides import OF_ENGINE, Engine, Ready, Side

TINY = shrunken(SHAPES["1b"])
OUTCOME = Outcome(2.0, 100, 10, (), [1.0, 2.0], [8.0, 12.0], 0.1, 0.0005)


def test_a_llama_counts_on_from_the_last_token_of_its_prompt() -> None:
    assert TINY.answer(7, 3) == [8, 9, 10]


@pytest.mark.parametrize("shape", [*SHAPES.values(), TINY])
def test_every_answer_stays_in_the_vocabulary(shape: Any) -> None:
    for prompt in shape.prompts(50, 4):
        assert shape.answer(prompt[-1], ANSWER_TOKENS)[-1] < shape.vocabulary


def test_each_shape_has_the_size_of_its_name() -> None:
    assert SHAPES["1b"].kv_bytes_per_token == 32 * 1024
    assert SHAPES["8b"].kv_bytes_per_token == 128 * 1024


def plan(**changes: Any) -> Plan:
    given = {"shape": TINY, "requests": 4, "concurrent": 4, "rounds": 3, "paced_s": 0.1}
    return Plan(**{**given, "limit_s": 100.0, "on_gpu": False, **changes})


class Clock:
    """Advances by a second with each load."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """Engines that are ready in 3 s and answer in one, except `async`, which does not start."""
    clock = Clock()

    def begin(engine: Engine, workload: Workload, stack: ExitStack) -> Ready:
        def run(load: Load) -> Outcome:
            clock.now += 1.0
            return OUTCOME

        def ready() -> Mapping[str, Side]:
            if engine == "async":
                raise ChildProcessError("its\nlast words")
            clock.now += 3.0
            return dict.fromkeys(OF_ENGINE[engine], Side(run, []))

        return ready

    monkeypatch.setenv("TOKENYARD_BENCH_MODELS", str(tmp_path))
    monkeypatch.setattr(serving_shape, "begin", begin)
    monkeypatch.setattr(serving_shape, "time", clock)
    monkeypatch.setattr(serving_shape, "write_llama", lambda shape, folder: folder / shape.name)
    return clock


@pytest.mark.usefixtures("clock")
def test_a_side_that_does_not_start_is_named_and_the_others_run() -> None:
    saved: list[Found] = []
    found = measure(plan(), saved.append)
    assert found.failed == {"async": "its\nlast words"}
    assert set(found.full) == {"generate", "stepped", "serve", "serve_stream"} | {
        "tokenyard",
        "tokenyard_stream",
    }
    assert len(saved) == 3 * 6 + 2  # each round of each side, the fault, and the end
    # I expect null with a reason where a figure is missing, and all other figures
    figures = summary(found, plan())
    assert figures["async_tokens_per_s"] is figures["ratio_to_async"] is None
    assert figures["reasons"]["ratio_to_async"] == "async failed"
    assert set(figures["reasons"]) == {name for name, one in figures.items() if one is None}
    assert figures["tokens_per_s"] == 50.0
    json.dumps(figures)


def test_figures_without_a_measurement_are_null_with_a_reason() -> None:
    figures = summary(Found(), plan())
    for name in (*RATIOS, *BROKER, "tokens_per_s", "ttft_p99_ms"):
        assert figures[name] is None
        assert figures["reasons"][name] == "not run"


def two_rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two rounds of cold starts, in which warm starts and requests succeed."""
    monkeypatch.setattr(cold_rounds, "measure_warm", lambda _: {"warm_create": Timed(0.5, {})})
    monkeypatch.setattr(cold_rounds, "measure_request", lambda *_: Timed(1.0, {}))
    return cold_rounds.measure(MODELS, rounds=2, limit_s=None, save=lambda _: None)


def test_a_start_that_had_to_compile_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = iter([9.0, 1.0, 2.0])

    def llm(_: object) -> Timed:
        (tmp_path / "torch_compile_cache" / "torch_aot_compile" / "hash").mkdir(
            parents=True, exist_ok=True
        )
        return Timed(next(seconds), {})

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(cold_rounds, "measure_serve", lambda _: Timed(5.0, {}))
    monkeypatch.setattr(cold_rounds, "measure_llm", llm)
    found = two_rounds(monkeypatch)
    assert found.first == {"llm_cold": Timed(9.0, {})}
    assert [one["llm_cold"].seconds for one in found.rounds] == [1.0, 2.0]


def test_a_cold_start_that_fails_is_named_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def serve(_: object) -> Timed:
        tried.append("serve")
        raise ChildProcessError("vllm serve has ended:\nits last words")

    monkeypatch.setattr(cold_rounds, "measure_serve", serve)
    monkeypatch.setattr(cold_rounds, "measure_llm", lambda _: Timed(2.0, {}))
    found = two_rounds(monkeypatch)
    figures = report(found)
    assert tried == ["serve"]
    assert (len(found.rounds), figures["rounds"], figures["model"]) == (2, 2, "adder")
    assert figures["serve_cold"] is None
    assert figures["reasons"]["serve_cold"] == "serve_cold failed"
    assert (figures["llm_cold"], figures["request_cold"]) == (2.0, 1.0)
    assert figures["first_round"] is None
    assert "its last words" in figures["failed"]["serve_cold"]
