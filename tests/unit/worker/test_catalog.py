"""The models that a host may load, and the host's entry in the yard."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import ModelInfo, ServingInfo
from worker.host.catalog import HostEntry, read_catalog
from worker.models import AdapterSpec, ModelSpec

FILE = """
[models.adder]
path = "org/adder"
pin = 1

[models.subtractor]
path = "org/subtractor"
max_model_wait_s = 5.0
"""


def settings(**values: Any) -> WorkerSettings:
    return WorkerSettings(redis_url="redis://x", **({"engine": "simulated"} | values))


class TestCatalog:
    def test_the_models_come_from_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "models.toml"
        file.write_text(FILE)

        catalog = read_catalog(settings(models=file))

        assert list(catalog) == ["adder", "subtractor"]
        assert catalog["adder"] == ModelSpec(name="adder", path="org/adder", pin=1)

    def test_without_a_file_the_settings_name_one_model(self) -> None:
        catalog = read_catalog(
            settings(
                model="org/adder",
                model_name="sums",
                revision="r7",
                dtype="float16",
                max_model_len=512,
                max_num_seqs=8,
                enforce_eager=True,
                engine_args='{"seed": 3}',
            )
        )

        assert catalog == {
            "sums": ModelSpec(
                name="sums",
                path="org/adder",
                revision="r7",
                dtype="float16",
                max_model_len=512,
                max_num_seqs=8,
                enforce_eager=True,
                engine_args={"seed": 3},
            )
        }

    def test_a_model_without_name_and_length_has_its_own(self) -> None:
        (spec,) = read_catalog(settings(model="/models/adder")).values()

        assert (spec.name, spec.max_model_len) == ("adder", None)


class TestHostEntry:
    @pytest.fixture
    def entry(self) -> HostEntry:
        adapters = (AdapterSpec("lora", "org/lora"), AdapterSpec("other", "org/other"))
        adder = ModelSpec("adder", "org/adder", adapters=adapters, pin=2, max_model_wait_s=5.0)
        large = ModelSpec("large", "org/large", tensor_parallel_size=2, pipeline_parallel_size=2)
        return HostEntry(settings(name="host", slots=4), {"adder": adder, "large": large})

    def test_the_entry_shows_the_models_of_the_file(self, entry: HostEntry) -> None:
        info = entry.info

        assert (info.name, info.host, info.devices) == ("host", socket.gethostname(), 4)
        adder, large = (ServingInfo(path=f"org/{name}") for name in ("adder", "large"))
        adapters = ["lora", "other"]
        assert info.models == [
            ModelInfo(name="adder", adapters=adapters, pin=2, max_model_wait_s=5.0, serving=adder),
            ModelInfo(name="large", ranks=4, serving=large),
        ]

    def test_gateways_are_told_what_they_need(self) -> None:
        spec = ModelSpec(
            "m",
            "org/m",
            engine_args={"max_logprobs": 50, "block_size": 16},
            serve_args={"tool_call_parser": "hermes"},
        )

        [model] = HostEntry(settings(), {"m": spec}).info.models

        assert model.serving is not None
        assert model.serving.serve_args == {"max_logprobs": 50, "tool_call_parser": "hermes"}

    def test_faults_are_forgiven_when_the_weights_change(self, entry: HostEntry) -> None:
        entry.load_failed("adder", "no such file", "/step-1")
        entry.load_failed("large", "out of memory")
        weights = {"adder": "/step-1", "large": ""}

        assert entry.forgive(weights.__getitem__) == set()
        weights["adder"] = "/step-2"
        assert entry.forgive(weights.__getitem__) == {"adder"}

        assert [(one.fault, one.faults, one.faulted_ms > 0) for one in entry.info.models] == [
            ("", 0, False),
            ("out of memory", 1, True),
        ]
        assert entry.forgive(weights.__getitem__) == set()

    def test_a_swap_costs_the_last_times_of_leaving_and_coming(self, entry: HostEntry) -> None:
        swaps_s = []
        for note in (
            lambda: entry.loaded("adder", 1.5),
            lambda: entry.gone("adder", 0.25),  # to sleep
            lambda: entry.came("adder", 0.125),  # from sleep
            lambda: entry.loaded("adder", 0.0),  # unknown length
        ):
            note()
            swaps_s.append(entry.info.models[0].swap_s)

        assert swaps_s == [1.5, 1.75, 0.375, 0.375]
        assert entry.info.models[0].load_s == 1.5
        assert entry.info.models[1].swap_s == 0.0

    def test_loads_that_are_killed_are_faults_from_the_second_in_a_row(
        self, entry: HostEntry
    ) -> None:
        """As by the kernel, for want of memory; else the same load is begun for ever."""
        faults = []
        for _ in range(2):
            entry.load_failed("adder", "ended by SIGKILL", is_lost=True)
            faults.append(entry.info.models[0].fault)
        entry.loaded("adder", 1.0)
        entry.load_failed("adder", "ended by SIGKILL", is_lost=True)

        assert faults == ["", "ended by SIGKILL"]
        assert entry.info.models[0].fault == ""

    def test_faults_are_counted_until_a_load_succeeds(self, entry: HostEntry) -> None:
        before_ms = time.time() * 1000
        entry.load_failed("adder", "no such file")
        entry.load_failed("adder", "out of memory")
        adder, large = entry.info.models
        assert (adder.fault, adder.faults) == ("out of memory", 2)
        assert before_ms - 1 <= adder.faulted_ms <= time.time() * 1000
        assert large.fault == ""

        entry.loaded("adder", 1.0)

        adder = entry.info.models[0]
        assert (adder.fault, adder.faults, adder.faulted_ms) == ("", 0, 0)


def test_an_engine_that_would_wait_for_others_is_refused() -> None:
    given = settings(engine="vllm", model="any", engine_args='{"data_parallel_size": 2}')
    with pytest.raises(SettingsError, match="data_parallel_size: leave it out"):
        read_catalog(given)
