"""Precedence of settings under `tokenyard up`: options, then variables, then its defaults."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from tests.cli.running import Up
from tests.support.vllm_versions import write_distribution
from tokenyard.cli.up import Foreground, up
from tokenyard.cli.up.local_yard import LocalPlan, LocalYard
from tokenyard.client.sync import Client
from tokenyard.process.program import Exit
from tokenyard.protocol.settings import WorkerSettings

StartUp = Callable[..., Up]


def assignments(path: Path) -> list[tuple[str, str]]:
    """The worker of each request in a record."""
    return [(one["id"], one["worker"]) for one in map(json.loads, path.read_text().splitlines())]


@pytest.mark.long
def test_a_record_made_under_up_is_replayed_under_up(start_up: StartUp, tmp_path: Path) -> None:
    # Given a record of a run whose workers have a name
    variables = {"TOKENYARD_WORKER_NAME": "w", "TOKENYARD_COORDINATOR_EXPECT_WORKERS": "2"}
    first, second = tmp_path / "first", tmp_path / "second"
    names = [f"q{number}" for number in range(8)]

    def run(**more: str) -> None:
        running = start_up(env=variables | more)
        ready: dict[str, Any] = running.wait_ready()
        with Client(ready["url"], client_id="ann") as client:
            items = [{"prompt": "hello", "id": name} for name in names]
            for handle in client.submit_many(items, max_tokens=2):
                handle.result(timeout=60)
        running.signal(signal.SIGTERM)
        assert running.wait() == Exit.OK

    run(TOKENYARD_COORDINATOR_RECORD=str(first))
    assert {worker for _, worker in assignments(first)} == {"w-0", "w-1"}

    # If it is replayed with exchanged workers, so that no policy makes the same choices
    other = str.maketrans("01", "10")
    wanted = [(name, worker.translate(other)) for name, worker in assignments(first)]
    lines = map(json.loads, first.read_text().splitlines())
    swapped = tmp_path / "swapped"
    swapped.write_text(
        "".join(
            json.dumps(line | {"worker": line["worker"].translate(other)}) + "\n" for line in lines
        )
    )
    run(
        TOKENYARD_COORDINATOR_REPLAY=str(swapped),
        TOKENYARD_COORDINATOR_RECORD=str(second),
        TOKENYARD_COORDINATOR_POLICY="least_loaded",
    )

    # I expect the recorded assignments.
    assert assignments(second) == wanted


class TestVariables:
    """Precedence of the settings of `tokenyard up`."""

    @pytest.fixture
    def planned(
        self, invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Callable[..., LocalPlan]:
        """A function that returns the plan of `up`, with vLLM's build for the CPU."""
        write_distribution(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))

        def plan(*arguments: str, **env: str) -> LocalPlan:
            plans: list[LocalPlan] = []
            monkeypatch.setattr(Foreground, "run", lambda this: plans.append(this._plan))
            done = invoke("up", *arguments, env=env)
            assert done.exit_code == Exit.OK, done.output
            return plans[0]

        return plan

    def test_each_option_of_the_workers_has_its_variable(self) -> None:
        fields = {field.name for field in dataclasses.fields(WorkerSettings)}
        options = [one for one in up.params if _setting_of(one) in fields]

        assert len(options) >= 9
        for option in options:
            assert option.envvar == f"TOKENYARD_WORKER_{_setting_of(option).upper()}", option.name

    def test_an_option_overrides_a_variable(self, planned: Callable[..., LocalPlan]) -> None:
        env = {
            "TOKENYARD_WORKER_ENGINE": "simulated",
            "TOKENYARD_WORKER_SLOTS": "5",
            "TOKENYARD_WORKER_GRACE_S": "7",
            "TOKENYARD_WORKER_NAME": "w",
        }

        plan = planned("--slots", "3", **env)

        assert (plan.engine, plan.workers, plan.grace_s, plan.name) == ("simulated", 3, 7.0, "w")

    def test_a_given_model_overrides_a_variable(
        self, planned: Callable[..., LocalPlan], tmp_path: Path
    ) -> None:
        listed = tmp_path / "models.toml"
        listed.write_text("[models.a]\npath = 'a'")

        one = planned("--model", str(tmp_path), TOKENYARD_WORKER_MODELS=str(listed))
        several = planned("--models", str(listed), TOKENYARD_WORKER_MODEL=str(tmp_path))

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


def _setting_of(option: click.Parameter) -> str:
    return "slots" if option.name == "workers" else str(option.name)
