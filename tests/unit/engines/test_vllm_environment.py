"""vLLM's environment variables in worker processes."""

from __future__ import annotations

import importlib.util

import pytest

from worker.engines.vllm.environment import engine_environment

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize(("is_there", "said"), [(False, "0"), (True, None)])
def test_vllm_samples_without_flashinfer_where_it_is_not_installed(
    is_there: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = object() if is_there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)

    assert engine_environment(cpu=False).get(SAMPLER) == said
    assert SAMPLER not in engine_environment(cpu=True)


@pytest.mark.parametrize("cpu", [True, False])
def test_the_engine_runs_in_the_process_and_sends_no_usage_data(cpu: bool) -> None:
    environment = engine_environment(cpu=cpu)

    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
