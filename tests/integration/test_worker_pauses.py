"""Real workers that are paused: what runs, what waits, and what continues."""

from __future__ import annotations

import pytest

from tests.integration.operating import (
    ADDER,
    NewHost,
    Operator,
    count_nothing,
    published,
    running,
    shows,
)
from tests.support.builders import make_request
from tests.support.processes import START_S, Plant
from tests.support.streams import attempts, check_beginning, check_exact, streams
from tests.support.waiting import eventually
from tokenyard.protocol.control import (
    ALL,
    PAUSE_MODES,
    DesiredState,
    PauseMode,
    encode_desired,
    worker_scope,
)
from tokenyard.protocol.wire import Request
from tokenyard.scripts.answers import Dispatched, Move


class TestPause:
    @pytest.mark.long
    @pytest.mark.parametrize("mode", PAUSE_MODES)
    def test_running_streams_stop_and_continue(
        self, plant: Plant, led_host: NewHost, operator: Operator, mode: PauseMode
    ) -> None:
        # Given a worker with running streams
        host = led_host()
        host.obey("load", "host", model="adder")
        requests = running(plant, max_tokens=150 if mode == "wait" else 300)
        before = host.find("host")
        assert before

        # If it is paused
        operator.say("PAUSE", mode=mode)

        # I expect them, by the mode, back in the queue, finished, or kept,
        assert shows(host, "PAUSED").state == "ready"
        after = host.find("host")
        assert after
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
        assert shows(host, "RUNNING").pid == before[1].pid

    @pytest.mark.long
    def test_a_kept_request_past_its_deadline_ends(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        # Given a kept stream with a deadline
        host = led_host()
        host.obey("load", "host", model="adder")
        deadline_ms = plant.connection.time()[0] * 1000 + 5000
        (late,) = streams(1, 8000, model="adder", deadline_ms=deadline_ms)
        plant.push(late)
        others = running(plant)
        pid = host.process("host").pid

        operator.say("PAUSE", mode="keep")

        # I expect it to end then, and the others to continue in the same process.
        assert plant.result(late.id).status == "expired"
        check_beginning(plant, late)
        operator.say("UNPAUSE")
        assert attempts(check_exact(plant, others)) == [1] * 3
        assert host.process("host").pid == pid

    @pytest.mark.long
    def test_a_request_that_slips_through_goes_back(
        self, plant: Plant, new_host: NewHost, operator: Operator
    ) -> None:
        # Given a paused worker, and a leader that does not know of the pause and dispatches to it
        host = new_host(simulated_step_s=0.02)
        host.obey("load", "host", model="adder")
        operator.say("PAUSE")
        first = host.find("host")
        assert first
        (request,) = streams(1, 5, model="adder")
        dispatch(plant, first[0], request)

        # I expect it to leave the request behind, and to return as paused as before.
        eventually(lambda: (found := host.find("host")) and found[0] != first[0])
        shows(host, "PAUSED")

        # The request loses no attempt, and is answered later.
        plant.coordinator(static=True)
        operator.say("UNPAUSE")
        assert attempts(check_exact(plant, [request])) == [2]
        count_nothing(plant, [request])

    @pytest.mark.long
    def test_modes_may_follow_each_other(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        # Given kept streams
        host = led_host()
        host.obey("load", "host", model="adder")
        requests = running(plant, max_tokens=300)
        operator.say("PAUSE", ALL, mode="keep")
        kept = host.find("host")

        # If another scope wants them back
        operator.say("PAUSE", ADDER, mode="abort")

        # I expect them back in the queue, and to continue when no scope wants a pause.
        assert host.find("host") != kept
        operator.say("UNPAUSE", ADDER)
        shows(host, "PAUSED")
        operator.say("UNPAUSE", ALL)
        assert attempts(check_exact(plant, requests)) == [2] * 3

    @pytest.mark.long
    def test_a_slow_pause_may_be_taken_back(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        host = led_host()
        host.obey("load", "host", model="adder")
        requests = running(plant, max_tokens=400)

        given = operator.give("PAUSE", mode="wait")
        eventually(lambda: "PauseEngine(mode='wait')" in host.program.log)
        assert operator.signals.unacknowledged(given), "they still run"
        operator.say("UNPAUSE")

        shows(host, "RUNNING")
        assert attempts(check_exact(plant, requests)) == [1] * 3

    @pytest.mark.long
    def test_only_workers_of_the_scope_pause(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        host = led_host(slots=2)
        for name in ("host-0", "host-1"):
            host.obey("load", name, model="adder")
        plant.wait_for_turns("host-0", "host-1", model="adder")
        requests = running(plant, 4, max_tokens=300)

        operator.say("PAUSE", worker_scope("host-0"))

        shows(host, "PAUSED", "host-0")
        shows(host, "RUNNING", "host-1")
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

    @pytest.mark.long
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

    @pytest.mark.long
    def test_a_disconnected_controller_finds_the_desired_state(
        self, plant: Plant, led_host: NewHost, operator: Operator
    ) -> None:
        # Given a desired state that no signal reported
        host = led_host()
        host.obey("load", "host", model="adder")
        paused = encode_desired(DesiredState(run_state="PAUSED"))
        plant.connection.hset(plant.keys.desired, ALL, paused)

        # If the connections are lost, so that signals may have been missed
        plant.connection.client_kill_filter(_type="normal", skipme=True)

        shows(host, "PAUSED")


def _is_warm(plant: Plant) -> bool:
    return {info.state for info in plant.roster().values()} == {"warm"}


def _obedient(plant: Plant, name: str) -> bool:
    changed = plant.connection.hget(plant.keys.desired, "changed")
    found = [info for info in plant.roster().values() if info.name == name]
    return bool(found) and all(info.obeyed == changed.decode() for info in found)
