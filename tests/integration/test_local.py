"""A program's own engines, without Redis: their life, their models, and their end."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.docs.pages import first_names, page, section
from tests.integration.local_pool import LONG, PAIR, ROOT, SIM, START_S, Start, kill, states
from tests.support.processes import is_gone
from tests.support.vllm_versions import write_distribution
from tests.support.waiting import eventually
from tokenyard.protocol.errors import (
    EngineLost,
    InvalidRequest,
    LoadFailed,
    NoFreeDevice,
    SettingsError,
    WaitTimeout,
)
from tokenyard.protocol.replies import Result
from worker import EngineHandle, ModelSpec, ProcessStatus, WorkerController
from worker.engines.simulated.engine import BROKEN


class TestLife:
    @pytest.mark.long
    def test_a_process_outlives_its_models(self, start: Start) -> None:
        # Given a warm process
        controller = start()
        controller.wait_warm()
        (warm,) = controller.status()
        assert (warm.state, warm.model, warm.phases_s) == ("warm", "", {"import": 0.0})

        # If two models come and go
        for name in ("first", "second"):
            with controller.create(replace(SIM, name=name, revision="r1")) as engine:
                (status,) = controller.status()
                assert (status.state, status.model, status.pid) == ("ready", name, warm.pid)
                assert (engine.model, engine.devices) == (name, (0,))
                assert (engine.info.model, engine.info.revision) == (name, "r1")
                assert set(engine.phases_s) == {"weights"}

            # I expect each to leave the same process behind, as warm as before.
            (status,) = controller.status()
            assert (status.state, status.model, status.pid) == ("warm", "", warm.pid)

    def test_a_controller_connects_nowhere(self, start: Start) -> None:
        controller = start(slots=2)
        controller.create(SIM).generate("a")

        for status in controller.status():
            assert psutil.Process(status.pid).net_connections("inet") == []

    def test_status_can_be_printed(self) -> None:
        status = ProcessStatus("local-1", 1, "ready", "sim", 7, {"weights": 0.123}, None, None, "")

        assert str(status) == "local-1    device 1  ready      sim  weights 0.12 s"

    def test_models_come_from_a_file_by_name(self, start: Start, tmp_path: Path) -> None:
        file = tmp_path / "models.toml"
        file.write_text('[models.one]\npath = "org/one"\n[models.two]\npath = "org/two"\n')
        controller = start(file)

        assert controller.create("two").info.model == "two"
        with pytest.raises(InvalidRequest, match="'three' is not listed; use one, two"):
            controller.create("three")

    def test_models_come_from_a_mapping(self, start: Start) -> None:
        assert start({"a": replace(SIM, name="a")}).create("a").model == "a"

    def test_delete_lets_running_requests_finish(self, start: Start) -> None:
        # Given a running request
        controller = start(simulated_step_s=0.01)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=30)
        next(pieces)

        # If its engine is deleted
        controller.delete(engine)

        # I expect the complete answer, and no more.
        *_, result = pieces
        assert isinstance(result, Result)
        assert len(result.tokens) == 30
        with pytest.raises(RuntimeError, match="sim was deleted"):
            engine.generate("a")
        controller.delete(engine)
        assert states(controller) == [("warm", "")]

    def test_the_wait_of_a_delete_is_bounded(self, start: Start) -> None:
        controller = start(simulated_step_s=0.05, drain_timeout_s=0.1)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)

        controller.delete(engine)

        with pytest.raises(EngineLost, match="had to go"):
            list(pieces)


class TestLoading:
    def test_a_broken_model_has_its_process_replaced(self, start: Start) -> None:
        controller = start()
        controller.wait_warm()
        (before,) = controller.status()

        with pytest.raises(LoadFailed, match="bad: RuntimeError: broken model"):
            controller.create(ModelSpec("bad", BROKEN))

        assert controller.create(SIM).generate("a")[0].ok
        assert controller.status()[0].pid != before.pid

    def test_a_full_pool_names_its_engines(self, start: Start) -> None:
        controller = start(slots=2)
        engine = controller.create(SIM)

        with pytest.raises(NoFreeDevice, match="pair takes 2, 1 free: device 0 holds sim; delete"):
            controller.create(PAIR)
        engine.close()
        assert controller.create(PAIR).devices == (0, 1)

    def test_a_warm_device_is_taken_first(self, start: Start) -> None:
        controller = start(slots=2, backoff_s=60.0, max_backoff_s=60.0)
        controller.wait_warm()
        kill(controller.status()[0].pid)
        eventually(lambda: controller.status()[0].state == "failed")

        assert controller.create(SIM).devices == (1,)

    def test_a_load_that_takes_too_long_is_given_up(self, start: Start) -> None:
        controller = start()
        controller.wait_warm()
        process = psutil.Process(controller.status()[0].pid)

        process.suspend()
        with pytest.raises(WaitTimeout, match=r"sim is not up within 0.05 s"):
            controller.create(SIM, timeout_s=0.05)
        process.resume()

        assert controller.create(replace(SIM, name="next")).generate("a")[0].ok

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (replace(SIM, tensor_parallel_size=0), "model: Expected `int` >= 1"),
            (replace(SIM, tensor_parallel_size=2), "sim takes 2 devices, of 1 in all"),
            (replace(SIM, name=""), "model: give it a name"),
            (replace(SIM, sampling={"top_p": 2.0}), "params.top_p"),
            (replace(SIM, engine_args={"a": object()}), "model: "),
        ],
    )
    def test_an_invalid_spec_is_refused(self, start: Start, spec: ModelSpec, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            start().create(spec)

    def test_relative_paths_are_valid_in_the_process(
        self, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a program in another folder, with a folder that is named like the broken model
        (tmp_path / BROKEN).mkdir()
        monkeypatch.chdir(tmp_path)

        # I expect the model in that folder, and the process to get its absolute path.
        assert start().create(ModelSpec("sim", BROKEN)).generate("a")[0].ok


class TestEnding:
    def test_waiting_callers_get_an_error(self, start: Start) -> None:
        controller = start(simulated_step_s=0.01)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)
        pids = [one.pid for one in controller.status()]

        controller.stop()

        with pytest.raises(EngineLost, match="the controller has stopped"):
            list(pieces)
        with pytest.raises(RuntimeError, match="does not run"):
            engine.generate("a")
        engine.close()
        assert controller.status() == []
        assert not any(psutil.pid_exists(pid) for pid in pids)

    def test_running_requests_have_the_grace(self, start: Start) -> None:
        controller = start(simulated_step_s=0.01, grace_s=START_S)
        pieces = controller.create(SIM).stream("a", max_tokens=30)
        next(pieces)

        controller.stop()

        *_, result = pieces
        assert isinstance(result, Result)
        assert result.ok

    def test_a_controller_may_be_stopped_twice_and_started_again(self, start: Start) -> None:
        controller = start()
        controller.start()
        controller.stop()
        controller.stop()
        with pytest.raises(RuntimeError, match="start it first"):
            controller.create(SIM)

        with controller:
            assert controller.create(SIM).generate("a")[0].ok

    def test_a_controller_stops_while_processes_start(self, start: Start) -> None:
        start(slots=2).stop()

    def test_a_waiting_create_gets_an_error(self, start: Start) -> None:
        controller = start(simulated_load_s=60.0)
        controller.wait_warm()

        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(controller.create, SIM)
            eventually(lambda: states(controller) == [("loading", "sim")])
            controller.stop()
            with pytest.raises(EngineLost, match="the controller has stopped"):
                waits.result()

    @pytest.mark.long
    def test_a_program_that_stops_nothing_ends(self) -> None:
        script = """
from worker import ModelSpec, WorkerController
if __name__ == "__main__":
    controller = WorkerController(engine="simulated", simulated_step_s=0.01)
    controller.start()
    engine = controller.create(ModelSpec("sim", "nowhere"))
    next(engine.stream("a", max_tokens=8000))
    print(controller.status()[0].pid)
"""
        ended = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60.0,
        )

        eventually(lambda: is_gone(int(ended.stdout)))


class TestSettings:
    def test_all_faults_are_reported_together(self) -> None:
        with pytest.raises(SettingsError) as caught:
            WorkerController(slots=0, spares=-1, engine="simulated")

        assert len(caught.value.errors) == 2

    def test_a_missing_models_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="cannot be read"):
            WorkerController(tmp_path / "models.toml")

    def test_all_pools_of_a_program_are_of_one_kind(
        self, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The fork-server has the environment of the first.
        start()
        write_distribution(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))

        with pytest.raises(SettingsError, match="use a new process"):
            WorkerController(engine="vllm").start()


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("### The controller", WorkerController), ("### An engine", EngineHandle)],
)
def test_the_page_has_all_verbs(heading: str, kind: type) -> None:
    told = section(page("docs/warm-workers.md"), heading)

    verbs = {name for name in vars(kind) if not name.startswith("_")}
    assert {name.partition("(")[0] for name in first_names(told)} == verbs
