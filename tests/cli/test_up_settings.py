"""Precedence of settings under `tokenyard up`: options, then variables, then its defaults."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Ask, StartUp
from tests.support.schedules import read_decisions
from tests.support.vllm_versions import write_distribution
from tokenyard.cli.up import up
from tokenyard.cli.up.local_yard import LocalPlan, LocalYard
from tokenyard.client.sync import Client
from tokenyard.process.program import Exit
from tokenyard.protocol.settings import WorkerSettings


@pytest.mark.long
def test_workers_under_up_have_their_names_in_a_record(start_up: StartUp, tmp_path: Path) -> None:
    record = tmp_path / "record"
    running = start_up(
        env={
            "TOKENYARD_WORKER_NAME": "w",
            "TOKENYARD_COORDINATOR_EXPECT_WORKERS": "2",
            "TOKENYARD_COORDINATOR_DETERMINISTIC": "true",
            "TOKENYARD_COORDINATOR_RECORD": str(record),
        }
    )
    ready: dict[str, Any] = running.wait_ready()
    with Client(ready["url"], client_id="ann") as client:
        for handle in client.submit_many(["hello"] * 8, max_tokens=2):
            handle.result(timeout=60)
    running.signal(signal.SIGTERM)
    assert running.wait() == Exit.OK

    assert [one.worker for one in read_decisions(record)] == ["w-0", "w-1"] * 4


class TestVariables:
    """Precedence of the settings of `tokenyard up`."""

    @pytest.fixture
    def planned(
        self,
        invoke: Ask,
        plans: list[LocalPlan],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> Callable[..., LocalPlan]:
        """A function that returns the plan of `up`, with vLLM's build for the CPU."""
        write_distribution(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))

        def plan(*arguments: str, **env: str) -> LocalPlan:
            done = invoke("up", *arguments, env=env)
            assert done.exit_code == Exit.OK, done.output
            return plans.pop()

        return plan

    def test_each_option_of_the_workers_has_its_variable(self) -> None:
        fields = {field.name for field in dataclasses.fields(WorkerSettings)}
        options = [one for one in up.params if one.name in fields]

        assert len(options) >= 9
        for option in options:
            assert option.envvar == f"TOKENYARD_WORKER_{str(option.name).upper()}"

    def test_an_option_overrides_a_variable(self, planned: Callable[..., LocalPlan]) -> None:
        env = {
            "TOKENYARD_WORKER_ENGINE": "simulated",
            "TOKENYARD_WORKER_SLOTS": "5",
            "TOKENYARD_WORKER_GRACE_S": "7",
            "TOKENYARD_WORKER_NAME": "w",
        }

        plan = planned("--slots", "3", **env)

        one = plan.worker
        assert (one.engine, one.slots, one.grace_s, one.name) == ("simulated", 3, 7.0, "w")

    def test_a_given_model_overrides_a_variable(
        self, planned: Callable[..., LocalPlan], tmp_path: Path
    ) -> None:
        listed = tmp_path / "models.toml"
        listed.write_text("[models.a]\npath = 'a'")

        one = planned("--model", str(tmp_path), TOKENYARD_WORKER_MODELS=str(listed)).worker
        several = planned("--models", str(listed), TOKENYARD_WORKER_MODEL=str(tmp_path)).worker

        assert (one.model, one.models) == (str(tmp_path), None)
        assert (several.model, several.models) == ("", listed)

    def test_a_models_file_is_checked_before_anything_starts(
        self, start_up: StartUp, tmp_path: Path
    ) -> None:
        listed = tmp_path / "models.toml"
        listed.write_text("[models.a]\npth = 'a'")

        running = start_up("--models", str(listed))

        assert running.wait() == Exit.USAGE
        assert "models.a.pth: is not known; did you mean path?" in running.said
        assert not running.data_dir.exists()

    def test_a_variable_does_not_override_a_decided_setting(
        self, monkeypatch: pytest.MonkeyPatch, planned: Callable[..., LocalPlan], tmp_path: Path
    ) -> None:
        listed = tmp_path / "models.toml"
        listed.write_text("[models.a]\npath = 'a'")
        monkeypatch.setenv("TOKENYARD_WORKER_MODELS", str(listed))
        monkeypatch.setenv("TOKENYARD_WORKER_ENFORCE_EAGER", "false")
        plan = dataclasses.replace(planned("--model", str(tmp_path)), enforce_eager=True)

        *_, controller = LocalYard(plan, lambda *_: None)._programs(tmp_path)

        assert "TOKENYARD_WORKER_MODELS" not in controller._env
        assert controller._env["TOKENYARD_WORKER_ENFORCE_EAGER"] == "false"
