"""Workers and control signals: real processes, some killed, and a real coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import make_request
from tests.support.hosts import Host
from tests.support.processes import START_S, Plant
from tests.support.streams import attempts, check_beginning, check_exact, streams, wait_mid_stream
from tests.support.waiting import eventually
from tokenyard.admin.signals import SignalReceipt, Signals
from tokenyard.protocol.control import (
    ALL,
    PAUSE_MODES,
    DesiredState,
    Order,
    PauseMode,
    Signal,
    encode_desired,
    model_scope,
    worker_scope,
)
from tokenyard.protocol.wire import Request
from tokenyard.scripts import Dispatched, Move
from worker.engines.simulated.backend import BROKEN

ADDER = model_scope("adder")


class Operator:
    """Gives signals to a yard, and waits until all workers have obeyed."""

    def __init__(self, plant: Plant) -> None:
        self.signals = Signals(plant.connection, plant.keys)

    def give(self, what: Signal, scope: str = ALL, **fields: Any) -> SignalReceipt:
        return self.signals.give(Order(signal=what, scope=scope, **fields))

    def say(self, what: Signal, scope: str = ALL, **fields: Any) -> None:
        assert self.signals.wait(self.give(what, scope, **fields), START_S) == []

    def reasons(self, what: Signal, scope: str = ALL, **fields: Any) -> dict[str, str]:
        """Why each worker does not obey."""
        left = self.signals.wait(self.give(what, scope, **fields), START_S)
        return {one.name: one.reason for one in left}


@pytest.fixture
def operator(plant: Plant) -> Operator:
    return Operator(plant)


NewHost = Callable[..., Host]


@pytest.fixture
def new_host(plant: Plant, tmp_path: Path) -> NewHost:
    """Start a host of slow engines, and a coordinator that commands nothing by itself."""

    def start(*, is_led: bool = True, **options: object) -> Host:
        if is_led:
            plant.coordinator(static=True)
        host = Host(plant, tmp_path, **{"simulated_step_s": 0.02, **options})
        slots = int(str(options.get("slots", 1))) + int(str(options.get("spares", 0)))
        names = [f"host-{number}" for number in range(slots)] if slots > 1 else ["host"]
        host.wait("warm", *names)
        return host

    return start


def running(plant: Plant, count: int = 3, max_tokens: int = 60, **fields: object) -> list[Request]:
    """Running streams of the adder."""
    requests = streams(count, max_tokens, model="adder", **fields)
    plant.push_all(requests)
    wait_mid_stream(plant, requests)
    return requests


def published(plant: Plant, requests: list[Request]) -> list[int]:
    return [plant.published(one.id) for one in requests]


def count_nothing(plant: Plant, requests: list[Request]) -> None:
    """Check that no failure is counted against these requests."""
    for request in requests:
        ledger = plant.ledger(request.id)
        counted = {ledger.get(name, "0") for name in ("crashes", "faults", "suspected")}
        assert counted == {"0"}, ledger


def run_state(host: Host, name: str = "host") -> str:
    found = host.find(name)
    return found[1].run_state if found else ""


class TestPause:
    @pytest.mark.parametrize("mode", PAUSE_MODES)
    def test_running_streams_stop_and_continue(
        self, plant: Plant, new_host: NewHost, operator: Operator, mode: PauseMode
    ) -> None:
        # Given a worker with running streams
        host = new_host()
        host.obey("load", "host", model="adder")
        requests = running(plant)
        before = host.find("host")
        assert before

        # If it is paused
        operator.say("PAUSE", mode=mode)

        # I expect them, by the mode, back in the queue, finished, or kept,
        after = host.find("host")
        assert after
        assert (after[1].run_state, after[1].state) == ("PAUSED", "ready")
        assert (after[0] == before[0]) == (mode != "abort")
        lane = plant.connection.xlen(plant.keys.lane(after[0]))
        assert lane == (len(requests) if mode == "keep" else 0)
        stands = published(plant, requests)
        if mode == "wait":
            assert attempts(check_exact(plant, requests)) == [1] * 3

        # no new requests on the worker,
        late = streams(2, 5, model="adder")
        plant.push_all(late)

        # and all to continue after the last token when it runs again, in the same process.
        assert published(plant, requests) == stands
        operator.say("UNPAUSE")
        answers = check_exact(plant, [*requests, *late])
        assert attempts(answers) == [2 if mode == "abort" else 1] * 3 + [1] * 2
        count_nothing(plant, [*requests, *late])
        assert run_state(host) == "RUNNING"
        assert host.wait("ready", "host", model="adder").pid == before[1].pid

    def test_a_kept_request_past_its_deadline_ends(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        # Given a kept stream with a deadline, longer than the time limit of a hang
        host = new_host(hang_timeout_s=2.5, lease_ms=3000)
        host.obey("load", "host", model="adder")
        deadline_ms = int(time.time() * 1000) + 6000
        (late,) = streams(1, 1000, model="adder", deadline_ms=deadline_ms)
        plant.push(late)
        wait_mid_stream(plant, [late])
        others = running(plant)
        pid = host.process("host").pid

        operator.say("PAUSE", mode="keep")

        # Given a kept stream with a deadline, later than the time limit of a hang
        assert plant.result(late.id).status == "expired"
        check_beginning(plant, late)
        operator.say("UNPAUSE")
        assert attempts(check_exact(plant, others)) == [1] * 3
        assert host.process("host").pid == pid

    def test_a_request_that_slips_through_goes_back(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        # Given a paused worker, and a leader that does not know of the pause and dispatches to it
        host = new_host(is_led=False)
        host.obey("load", "host", model="adder")
        operator.say("PAUSE")
        first = host.find("host")
        assert first
        (request,) = streams(1, 5, model="adder")
        dispatch(plant, first[0], request)

        # I expect it to leave the request behind, and to return as paused as before.
        eventually(lambda: (found := host.find("host")) and found[0] != first[0])
        eventually(lambda: run_state(host) == "PAUSED")

        # The request loses no attempt, and is answered later.
        plant.coordinator(static=True)
        operator.say("UNPAUSE")
        assert attempts(check_exact(plant, [request])) == [2]
        count_nothing(plant, [request])

    def test_modes_may_follow_each_other(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        # Given kept streams
        host = new_host()
        host.obey("load", "host", model="adder")
        requests = running(plant)
        operator.say("PAUSE", ALL, mode="keep")
        kept = host.find("host")

        # If another scope wants them back
        operator.say("PAUSE", ADDER, mode="abort")

        # I expect them back in the queue, and to continue when no scope wants a pause.
        assert host.find("host") != kept
        operator.say("UNPAUSE", ADDER)
        assert run_state(host) == "PAUSED"
        operator.say("UNPAUSE", ALL)
        assert attempts(check_exact(plant, requests)) == [2] * 3

    def test_a_slow_pause_may_be_taken_back(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host()
        host.obey("load", "host", model="adder")
        requests = running(plant, max_tokens=400)

        given = operator.give("PAUSE", mode="wait")
        eventually(lambda: "PauseEngine(mode='wait')" in host.program.log)
        assert operator.signals.unacknowledged(given), "they still run"
        operator.say("UNPAUSE")

        assert run_state(host) == "RUNNING"
        assert attempts(check_exact(plant, requests)) == [1] * 3

    def test_only_workers_of_the_scope_pause(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host(slots=2)
        for name in ("host-0", "host-1"):
            host.obey("load", name, model="adder")
        plant.wait_for_turns("host-0", "host-1", model="adder")
        requests = running(plant, 4)

        operator.say("PAUSE", worker_scope("host-0"))

        assert (run_state(host, "host-0"), run_state(host, "host-1")) == ("PAUSED", "RUNNING")
        answers = check_exact(plant, requests)
        assert sorted(attempts(answers)) == [1, 1, 2, 2]


def dispatch(plant: Plant, worker: str, request: Request) -> None:
    """Move a request onto a lane, like a leader that does not know of a pause."""
    plant.connection.set(plant.keys.leader, "1:deaf")
    plant.push(request)
    ((entry, _),) = plant.connection.xrange(plant.keys.intake("normal"))
    move = Move("normal", entry.decode(), request.client, request.id, worker, lane_limit=4)
    assert plant.scripts.dispatch("1:deaf", [move]) == [Dispatched.DISPATCHED]
    plant.connection.delete(plant.keys.leader)


class TestLate:
    def test_a_worker_joins_a_paused_yard(self, plant: Plant, operator: Operator) -> None:
        # Given a yard that was paused without workers
        plant.coordinator()
        operator.say("PAUSE")
        operator.say("SET_GENERATION_EPOCH", epoch=7)

        # If a controller starts
        plant.worker(name="late")
        plant.wait_for_workers(1)

        # I expect its worker to load its model and to serve nothing
        eventually(lambda: _obedient(plant, "late"))
        eventually(lambda: {info.epoch for info in plant.roster().values()} == {7})
        (info,) = plant.roster().values()
        assert info.run_state == "PAUSED"
        request = make_request()
        plant.push(request)

        # until it may.
        operator.say("UNPAUSE")
        result = plant.result(request.id)
        assert result.ok
        assert result.provenance
        assert (result.provenance.attempt, result.provenance.epoch) == (1, 7)

    def test_a_suspended_yard_loads_nothing(self, plant: Plant, operator: Operator) -> None:
        plant.coordinator()
        operator.say("PAUSE")
        operator.say("SUSPEND")

        controller = plant.worker(name="late")
        eventually(lambda: _is_warm(plant), timeout_s=START_S)
        assert _obedient(plant, "late")
        (info,) = plant.roster().values()
        assert info.run_state == "SUSPENDED"
        assert "is up" not in controller.log

        operator.say("RESUME")
        (info,) = plant.wait_for_workers(1).values()
        assert info.run_state == "PAUSED"
        operator.say("UNPAUSE")
        request = make_request()
        plant.push(request)
        assert plant.result(request.id).ok

    def test_a_disconnected_controller_finds_the_desired_state(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        # Given a desired state that no signal reported
        host = new_host()
        host.obey("load", "host", model="adder")
        paused = encode_desired(DesiredState(run_state="PAUSED"))
        plant.connection.hset(plant.keys.desired, ALL, paused)

        # If the connections are lost, so that signals may have been missed
        plant.connection.client_kill_filter(_type="normal", skipme=True)

        eventually(lambda: run_state(host) == "PAUSED")


def _is_warm(plant: Plant) -> bool:
    return {info.state for info in plant.roster().values()} == {"warm"}


def _obedient(plant: Plant, name: str) -> bool:
    changed = plant.connection.hget(plant.keys.desired, "changed")
    found = [info for info in plant.roster().values() if info.name == name]
    return bool(found) and all(info.obeyed == changed.decode() for info in found)


class TestSuspend:
    @pytest.mark.parametrize("mode", ["abort", "keep"])
    def test_engines_release_their_devices(
        self, plant: Plant, new_host: NewHost, operator: Operator, mode: PauseMode
    ) -> None:
        # Given a worker that is paused in the middle of its streams
        host = new_host(spares=1)
        host.obey("load", "host-0", model="adder")
        requests = running(plant)
        pid = host.process("host-0").pid
        operator.say("PAUSE", mode=mode)

        # If it is suspended
        operator.say("SUSPEND")

        # I expect its engine to sleep, its streams to wait, and no process to take its device,
        info = host.wait("asleep", "host-0", model="adder")
        assert info.run_state == "SUSPENDED"
        assert run_state(host, "host-1") == "SUSPENDED"
        eventually(lambda: {plant.ledger(one.id)["state"] for one in requests} == {"waiting"})
        assert "suspended" in host.refuse("wake", "host-0")
        assert host.state("host-1") == "warm"

        # and all to continue in the same process when it wakes and may run.
        operator.say("RESUME")
        info = host.wait("ready", "host-0", model="adder")
        assert (info.run_state, info.pid) == ("PAUSED", pid)
        operator.say("UNPAUSE")
        assert attempts(check_exact(plant, requests)) == [2] * 3
        count_nothing(plant, requests)

    def test_a_process_that_dies_asleep_returns_without_a_model(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host()
        host.obey("load", "host", model="adder")
        operator.say("PAUSE")
        operator.say("SUSPEND")

        process = host.process("host")
        process.kill()
        process.wait(10.0)
        info = host.wait("warm", "host")
        assert info.run_state == "SUSPENDED"

        operator.say("RESUME")
        assert host.wait("ready", "host", model="adder").run_state == "PAUSED"

    def test_an_engine_that_cannot_sleep_is_unloaded(
        self, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host()
        host.obey("load", "host", model="wakeful")
        operator.say("PAUSE")

        operator.say("SUSPEND")

        assert host.wait("warm", "host").run_state == "SUSPENDED"
        operator.say("RESUME")
        host.wait("ready", "host", model="wakeful")

    def test_a_suspended_group_is_formed_again(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host(slots=2)
        host.obey("load", "host-0", model="pair")
        requests = streams(2, 60, model="pair")
        plant.push_all(requests)
        wait_mid_stream(plant, requests)

        operator.say("PAUSE", model_scope("pair"), mode="keep")
        operator.say("SUSPEND", model_scope("pair"))
        host.wait("warm", "host-0", "host-1")
        operator.say("RESUME", model_scope("pair"))
        host.wait("ready", "host-0", model="pair")
        operator.say("UNPAUSE", model_scope("pair"))

        assert attempts(check_exact(plant, requests)) == [2] * 2


class TestOthers:
    def test_an_unsupported_signal_is_reported_and_blocks_no_other(
        self, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host()
        host.obey("load", "host", model="adder")

        (reason,) = operator.reasons("START_PROFILE").values()
        assert "no profiler" in reason
        operator.say("PAUSE")
        eventually(lambda: run_state(host) == "PAUSED")  # the roster follows

        operator.say("STOP_PROFILE")
        operator.say("UNPAUSE")

    def test_weights_that_cannot_be_loaded_keep_a_worker_paused(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        # Given a model whose weights are replaced by broken ones
        host = new_host()
        host.obey("load", "host", model="adder")
        operator.say("PAUSE", ADDER)
        reasons = operator.reasons("RELOAD_WEIGHTS", ADDER, weights=f"/w/{BROKEN}")
        assert "broken weights" in reasons["host"]

        # I expect it to answer nothing with the wrong weights,
        reasons = operator.reasons("UNPAUSE", ADDER)
        assert "broken weights" in reasons["host"]
        assert run_state(host) == "PAUSED"

        # and to run as soon as it has the right ones.
        operator.say("PAUSE", ADDER)
        operator.say("RELOAD_WEIGHTS", ADDER, weights="/w/2")
        operator.say("UNPAUSE", ADDER)
        found = host.find("host")
        assert found
        assert (found[1].run_state, found[1].weights) == ("RUNNING", "/w/2")

    def test_a_later_load_starts_with_the_weights(
        self, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host(slots=2)
        host.obey("load", "host-0", model="adder")
        assert operator.signals.reload("adder", "/w/2", 2, "wait", START_S) == []

        host.obey("load", "host-1", model="adder")

        eventually(lambda: (found := host.find("host-1")) and found[1].epoch == 2)
        info = host.wait("ready", "host-1", model="adder")
        assert info.weights == "/w/2"
        assert "Reload" not in host.program.log.rpartition("is up with adder")[2]

    def test_a_paused_worker_may_be_drained(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        host = new_host()
        host.obey("load", "host", model="adder")
        requests = running(plant)
        operator.say("PAUSE", mode="keep")

        operator.say("DRAIN")

        assert host.program.wait() == 0
        eventually(lambda: {plant.ledger(one.id)["state"] for one in requests} == {"waiting"})
        count_nothing(plant, requests)

    def test_sigterm_ends_a_paused_controller(
        self, plant: Plant, new_host: NewHost, operator: Operator, tmp_path: Path
    ) -> None:
        host = new_host()
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
