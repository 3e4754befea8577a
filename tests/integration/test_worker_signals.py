"""Workers and control signals: real processes, some killed, and a real coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.operating import ADDER, NewHost, Operator, count_nothing, running, shows
from tests.support.hosts import Host
from tests.support.processes import START_S, Plant
from tests.support.streams import attempts, begun, check_exact
from tests.support.waiting import eventually
from tokenyard.protocol.control import PauseMode, model_scope
from worker.engines.simulated.engine import BROKEN


class TestSuspend:
    @pytest.mark.long
    @pytest.mark.parametrize("mode", ["abort", "keep"])
    def test_engines_release_their_devices(
        self, plant: Plant, led_host: NewHost, operator: Operator, mode: PauseMode
    ) -> None:
        # Given a worker that is paused in the middle of its streams
        host = led_host(spares=1)
        host.obey("load", "host-0", model="adder")
        requests = running(plant)
        pid = host.process("host-0").pid
        operator.say("PAUSE", mode=mode)

        # If it is suspended
        operator.say("SUSPEND")

        # I expect its engine to sleep, its streams to wait, and no process to take its device,
        assert shows(host, "SUSPENDED", "host-0").state == "asleep"
        shows(host, "SUSPENDED", "host-1")
        eventually(lambda: {plant.ledger(one.id)["state"] for one in requests} == {"waiting"})
        assert "suspended" in host.refuse("wake", "host-0")
        assert host.state("host-1") == "warm"

        # and all to continue in the same process when it wakes and may run.
        operator.say("RESUME")
        info = shows(host, "PAUSED", "host-0")
        assert (info.state, info.pid) == ("ready", pid)
        operator.say("UNPAUSE")
        assert attempts(check_exact(plant, requests)) == [2] * 3
        count_nothing(plant, requests)

    @pytest.mark.long
    def test_a_process_that_dies_asleep_returns_without_a_model(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        host = led_host()
        host.obey("load", "host", model="adder")
        operator.say("PAUSE")
        operator.say("SUSPEND")

        process = host.process("host")
        process.kill()
        process.wait(10.0)
        assert host.wait("warm", "host").run_state == "SUSPENDED"

        operator.say("RESUME")
        assert host.wait("ready", "host", model="adder").run_state == "PAUSED"

    @pytest.mark.long
    def test_an_engine_that_cannot_sleep_is_unloaded(
        self, led_host: NewHost, operator: Operator
    ) -> None:
        host = led_host()
        host.obey("load", "host", model="wakeful")
        operator.say("PAUSE")

        operator.say("SUSPEND")

        assert host.wait("warm", "host").run_state == "SUSPENDED"
        operator.say("RESUME")
        host.wait("ready", "host", model="wakeful")

    @pytest.mark.long
    def test_a_suspended_group_is_formed_again(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        host = led_host(slots=2)
        host.obey("load", "host-0", model="pair")
        requests = begun(plant, 2, 60, model="pair")

        operator.say("PAUSE", model_scope("pair"), mode="keep")
        operator.say("SUSPEND", model_scope("pair"))
        host.wait("warm", "host-0", "host-1")
        operator.say("RESUME", model_scope("pair"))
        host.wait("ready", "host-0", model="pair")
        operator.say("UNPAUSE", model_scope("pair"))

        assert attempts(check_exact(plant, requests)) == [2] * 2


class TestOthers:
    @pytest.mark.long
    def test_weights_that_cannot_be_loaded_keep_a_worker_paused(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        # Given a model whose weights are replaced by broken ones
        host = led_host()
        host.obey("load", "host", model="adder")
        operator.say("PAUSE", ADDER)
        reasons = operator.reasons("RELOAD_WEIGHTS", ADDER, weights=f"/w/{BROKEN}")
        assert "broken weights" in reasons["host"]

        # I expect it to obey what has nothing to do with them,
        operator.say("SET_GENERATION_EPOCH", epoch=4)
        # to answer nothing with the wrong weights,
        reasons = operator.reasons("UNPAUSE", ADDER)
        assert "broken weights" in reasons["host"]
        shows(host, "PAUSED")

        # and to run as soon as it has the right ones.
        operator.say("PAUSE", ADDER)
        operator.say("RELOAD_WEIGHTS", ADDER, weights="/w/2")
        operator.say("UNPAUSE", ADDER)
        assert shows(host, "RUNNING").weights == "/w/2"

    @pytest.mark.long
    def test_a_later_load_starts_with_the_weights(
        self, led_host: NewHost, operator: Operator
    ) -> None:
        host = led_host(slots=2)
        host.obey("load", "host-0", model="adder")
        assert operator.signals.reload("adder", "/w/2", 2, "wait", START_S) == []

        host.obey("load", "host-1", model="adder")

        eventually(lambda: (found := host.find("host-1")) and found[1].epoch == 2)
        info = host.wait("ready", "host-1", model="adder")
        assert info.weights == "/w/2"
        assert "Reload" not in host.program.log.rpartition("is up with adder")[2]

    @pytest.mark.long
    def test_a_paused_worker_may_be_drained(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        host = led_host()
        host.obey("load", "host", model="adder")
        requests = running(plant)
        operator.say("PAUSE", mode="keep")

        operator.say("DRAIN")

        assert host.program.wait() == 0
        eventually(lambda: {plant.ledger(one.id)["state"] for one in requests} == {"waiting"})
        count_nothing(plant, requests)

    @pytest.mark.long
    def test_sigterm_ends_a_paused_controller(
        self, plant: Plant, led_host: NewHost, operator: Operator, tmp_path: Path
    ) -> None:
        host = led_host()
        host.obey("load", "host", model="adder")
        requests = running(plant)
        operator.say("PAUSE", mode="keep")

        assert host.program.stop() == 0
        count_nothing(plant, requests)

        again = Host(plant, tmp_path)
        again.wait("warm", "host")
        again.obey("load", "host", model="adder")
        operator.say("UNPAUSE")
        assert attempts(check_exact(plant, requests)) == [2] * 3
