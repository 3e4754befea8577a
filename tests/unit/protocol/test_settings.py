"""Settings: every fault at once, before anything is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from coordinator.__main__ import TEXTS as COORDINATOR_TEXTS
from tokenyard.process.program import SERVICE_TEXTS
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings, default_name
from worker.__main__ import TEXTS as WORKER_TEXTS

URL = "redis://x"


def coordinator(**values: Any) -> CoordinatorSettings:
    return CoordinatorSettings(redis_url=URL, **values)


def worker(**values: Any) -> WorkerSettings:
    return WorkerSettings(redis_url=URL, **({"engine": "simulated"} | values))


def test_all_errors_of_settings_are_reported_together() -> None:
    with pytest.raises(SettingsError) as caught:
        coordinator(yard="a/b", lease_ms=1, max_batch=0)
    assert [error.partition(" ")[0] for error in caught.value.errors] == [
        "yard",
        "lease_ms:",
        "max_batch:",
    ]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"yard": ""}, "yard"),
        ({"name": "a b"}, "name"),
        ({"expect_workers": -1}, "expect_workers"),
        ({"deterministic": True}, "deterministic"),
        ({"lease_ms": 499}, "lease_ms"),
        ({"block_ms": 0}, "block_ms"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs"),
        ({"max_request_bytes": 0}, "max_request_bytes"),
        ({"max_num_queued_tokens": 0}, "max_num_queued_tokens"),
        ({"max_crashes": 0}, "max_crashes"),
        ({"max_lost_alone": 0}, "max_lost_alone"),
        ({"max_faults": 0}, "max_faults"),
        ({"max_model_wait_s": -1}, "max_model_wait_s"),
        ({"lost_entry_wait_s": -1}, "lost_entry_wait_s"),
        ({"max_swap_share": 0}, "max_swap_share"),
        ({"max_swap_share": 1.1}, "max_swap_share"),
        ({"reply_maxlen": 0}, "reply_maxlen"),
        ({"dead_maxlen": 0}, "dead_maxlen"),
    ],
)
def test_coordinator_faults(values: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=f"^{field}") as caught:
        coordinator(**values)
    assert len(caught.value.errors) == 1


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"yard": "x" * 101}, "yard"),
        ({"name": "{x}"}, "name"),
        ({"engine": "vllm"}, "model"),
        ({"slots": 0}, "slots"),
        ({"slots": 2, "devices": ("0",)}, "devices"),
        ({"engine_args": "[]"}, "engine_args"),
        ({"engine_args": "{"}, "engine_args"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"lease_ms": 999}, "lease_ms"),
        ({"block_ms": 0}, "block_ms"),
        ({"start_timeout_s": 0}, "start_timeout_s"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
        ({"hang_timeout_s": 0}, "hang_timeout_s"),
        ({"backoff_s": 0}, "backoff_s"),
        ({"max_backoff_s": -1}, "max_backoff_s"),
        ({"grace_s": -1}, "grace_s"),
        ({"models": Path("/no/such/file")}, "models: no file"),
        ({"models": Path(__file__), "model": "org/adder"}, "models: the file names"),
        ({"models": Path(__file__), "model_name": "adder"}, "models: the file names"),
        ({"spares": -1}, "spares"),
        ({"sleepers": -1}, "sleepers"),
        ({"drain_timeout_s": 0}, "drain_timeout_s"),
        ({"leak_tolerance": -0.1}, "leak_tolerance"),
        ({"leak_floor_mib": -1}, "leak_floor_mib"),
        ({"simulated_load_s": -1}, "simulated_load_s"),
    ],
)
def test_worker_faults(values: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=f"^{field}") as caught:
        worker(**values)
    assert len(caught.value.errors) == 1


@pytest.mark.parametrize(
    ("model", "name", "serves"),
    [
        ("meta-llama/Llama-3.1-8B", "", "Llama-3.1-8B"),
        ("/models/adder/", "", "adder"),
        ("/models/adder", "sum", "sum"),
        ("", "", "simulated"),
    ],
)
def test_served_name(model: str, name: str, serves: str) -> None:
    assert worker(model=model, model_name=name).serves == serves


def test_a_file_of_models_is_enough_for_vllm() -> None:
    assert worker(engine="vllm", models=Path(__file__)).models


def test_default_names_are_names() -> None:
    assert coordinator(name=default_name("coordinator"))


@pytest.mark.parametrize(
    ("settings", "texts"),
    [(CoordinatorSettings, COORDINATOR_TEXTS), (WorkerSettings, WORKER_TEXTS)],
)
def test_each_setting_is_explained(settings: type, texts: dict[str, str]) -> None:
    names = {field.name for field in dataclasses.fields(settings)} - {"redis_url", "yard"}

    assert {*texts, *SERVICE_TEXTS} == names
