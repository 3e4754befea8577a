"""The pool of a host at work: real processes, commanded over the control stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.operating import NewHost
from tests.support.builders import make_request
from tests.support.hosts import Host, seconds_since
from tests.support.processes import START_S, Answer, Plant
from tests.support.streams import attempts, begun, check_exact, streams
from tests.support.waiting import eventually

#: Long enough to be seen on a machine that stops for seconds.
LOAD_S = 3.0


class TestStart:
    def test_processes_are_warm_before_the_first_model_is_requested(
        self, new_host: NewHost
    ) -> None:
        host = new_host(slots=2, spares=1)

        infos = [host.wait("warm", f"host-{number}") for number in range(3)]

        assert [info.device for info in infos] == [0, 1, 0]
        assert {info.pid for info in infos} == {one.pid for one in host.program.children()}
        for info in infos:
            assert (info.controller, info.model, info.lane_limit) == ("host", "", 2)
            assert "import" in info.phases_s
            assert info.memory_bytes == info.warm_bytes > 0
            assert 0 <= seconds_since(info.since_ms) < 60

    @pytest.mark.long
    def test_a_process_that_keeps_dying_is_shown_as_failed(
        self, plant: Plant, tmp_path: Path
    ) -> None:
        host = Host(
            plant,
            tmp_path,
            crash_point="warming",
            backoff_s=0.05,
            max_backoff_s=60,
            on_start_failure="retry",
        )

        host.wait("failed", "host")

        # It keeps trying, and leaves in order.
        deaths = host.program.log.count("process died")
        eventually(lambda: host.program.log.count("process died") > deaths, timeout_s=START_S)
        host.wait("failed", "host")
        assert host.program.stop() == 0
        assert not plant.roster()
        assert host.program.log.count("The workers of this host cannot start") == 1


class TestModels:
    @pytest.mark.long
    def test_load_swap_and_unload_happen_in_one_process(self, new_host: NewHost) -> None:
        # Given a warm process
        host = new_host(simulated_load_s=LOAD_S)
        pid = host.process("host").pid

        # If a model is loaded
        load = host.command("load", "host", model="adder")
        host.wait("loading", "host", model="adder")
        assert host.acknowledgement(load) is None, "not before it is there"
        assert host.answer(load).done

        # I expect it to become ready and to report how long that took,
        info = host.wait("ready", "host", model="adder")
        assert info.phases_s["weights"] >= LOAD_S
        assert (info.max_num_seqs, info.lane_limit) == (64, 80)
        assert info.swapped_ms == 0
        assert host.model("adder").load_s >= LOAD_S

        # to give way to another model under another name,
        first = host.find("host")
        host.obey("load", "host", model="subtractor")
        second = host.find("host")
        assert first
        assert second
        assert first[0] != second[0], "an incarnation serves one model at most"
        assert second[1].model == "subtractor"
        assert 0 <= seconds_since(second[1].swapped_ms) < 60

        # and to be warm again without a model.
        host.obey("unload", "host")
        info = host.wait("warm", "host")
        assert "unload" in info.phases_s
        assert info.pid == pid

    @pytest.mark.long
    def test_the_cost_of_a_swap_is_reported(self, new_host: NewHost) -> None:
        # Given a model that was loaded, put to sleep for another, and woken where it sleeps
        host = new_host(sleepers=1, simulated_load_s=LOAD_S)
        host.obey("load", "host-0", model="adder")
        eventually(lambda: host.model("adder").swap_s >= LOAD_S)
        host.obey("load", "host-0", model="subtractor")
        # It has also given way once.
        eventually(lambda: host.model("adder").swap_s > host.model("adder").load_s)
        asleep = host.wait("asleep", "host-0", model="adder")
        assert "sleep" in asleep.phases_s
        host.obey("load", "host-1", model="adder")
        awake = host.wait("ready", "host-0", model="adder")
        assert (set(awake.phases_s), awake.pid) == ({"wake"}, asleep.pid)
        host.wait("asleep", "host-1", model="subtractor")

        # I expect the wake to count as the cost, and the load to be reported as before.
        eventually(lambda: 0 < host.model("adder").swap_s < LOAD_S)
        assert host.model("adder").load_s >= LOAD_S
        eventually(lambda: host.model("subtractor").swap_s >= LOAD_S)


class TestOtherCommands:
    def test_drain_and_stop_close_devices(self, new_host: NewHost) -> None:
        # Given a host with two devices, one of them with a spare
        host = new_host(slots=2, spares=1)
        host.obey("load", "host-0", model="adder")

        # If the process on the first device is drained
        host.obey("drain", "host-0")

        # I expect its device to be closed, and no process to be started there,
        eventually(lambda: {one.name for one in host.plant.roster().values()} == {"host-1"})
        host.obey("load", "host-1", model="adder")
        assert len(host.program.children()) == 1

        # and the controller to end with its last process.
        host.command("stop", "host-1")
        assert host.program.wait() == 0
        assert not host.plant.roster()


class TestSwapsAndRequests:
    @pytest.mark.long
    def test_a_swap_interrupts_no_request(self, plant: Plant, new_host: NewHost) -> None:
        # Given two workers with the same model and running streams
        plant.coordinator(static=True)
        host = new_host(slots=2, simulated_step_s=0.02)
        for name in ("host-0", "host-1"):
            host.obey("load", name, model="adder")
        plant.wait_for_turns("host-0", "host-1", model="adder")
        requests = begun(plant, 6, 200, model="adder")

        # If one is to serve another model
        swap = host.command("load", "host-0", model="subtractor")
        host.wait("draining", "host-0", model="adder")
        others = streams(2, 5, model="subtractor")
        plant.push_all([*others, *(late := streams(2, 5, model="adder"))])

        # I expect its requests to finish there, new ones to go to the other worker,
        answers = check_exact(plant, requests)
        assert attempts(answers) == [1] * 6
        assert {_name(answer) for answer in answers} == {"host-0", "host-1"}
        assert {_name(answer) for answer in check_exact(plant, late)} == {"host-1"}

        # and those for the new model to wait for it.
        assert host.answer(swap).done
        assert {_name(answer) for answer in check_exact(plant, others)} == {"host-0"}

    @pytest.mark.long
    def test_requests_that_take_too_long_continue_elsewhere(
        self, plant: Plant, new_host: NewHost
    ) -> None:
        # Given a worker with long streams, and a short time limit
        plant.coordinator(static=True)
        host = new_host(slots=2, simulated_step_s=0.05, drain_timeout_s=0.5)
        host.obey("load", "host-0", model="adder")
        requests = begun(plant, 3, 100, model="adder")

        # If it is to serve another model, and another worker has the first
        host.obey("load", "host-0", model="subtractor")
        host.obey("load", "host-1", model="adder")

        # I expect the streams to continue there, and no worker to be counted as dead.
        answers = check_exact(plant, requests)
        assert attempts(answers) == [2, 2, 2]
        assert {_name(answer) for answer in answers} == {"host-1"}
        assert {plant.ledger(one.id).get("crashes", "0") for one in requests} == {"0"}


class TestGroups:
    def test_a_group_is_formed_and_released(self, plant: Plant, new_host: NewHost) -> None:
        # Given two warm processes
        plant.coordinator(static=True)
        host = new_host(slots=2)
        pids = {child.pid for child in host.program.children()}

        # If they are to hold a model together
        host.obey("load", "host-1", model="pair", devices=[1, 0])

        # I expect one to lead, the other to follow, and requests to be served,
        leader, follower = host.wait("ready", "host-1", model="pair"), host.find("host-0")
        assert follower
        assert (follower[1].state, follower[1].model) == ("attached", "pair")
        assert leader.group == follower[1].group == ["host-1", "host-0"]
        request = make_request(model="pair")
        plant.push(request)
        assert plant.result(request.id).ok

        # and both to be warm again afterwards, without a new process.
        host.obey("unload", "host-1")
        host.wait("warm", "host-0", "host-1")
        assert {child.pid for child in host.program.children()} == pids
        assert host.wait("warm", "host-0").group == []

    def test_a_group_that_cannot_be_loaded_releases_all_processes(self, new_host: NewHost) -> None:
        host = new_host(slots=2)
        names = ("host-0", "host-1")
        before = [host.incarnation(name) for name in names]

        assert "broken model" in host.refuse("load", "host-0", model="bad-pair")

        # If the processes of both have been replaced, I expect them to take other models.
        eventually(lambda: all(host.incarnation(name) not in ("", *before) for name in names))
        host.wait("warm", *names)
        host.obey("load", "host-1", model="adder")


def _name(answer: Answer) -> str:
    """The worker that gave an answer, without its incarnation."""
    provenance = answer.result.provenance
    return provenance.worker.partition(".")[0] if provenance else ""
