"""Processes that die in each state: no request is lost, and the pool recovers.

Two models take turns on a device, and a third one takes two devices. The engine is the simulated
one, so every token is known.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.crash.life_yard import MAX_MODEL_WAIT_S, WAIT_S, LifeYard
from tests.support.processes import Program, is_gone
from tests.support.servers import Server
from tests.support.streams import attempts
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request

pytestmark = pytest.mark.crash

#: A load that takes long enough to observe and interrupt.
LOAD_S = 2.0
#: Tokens of a stream that lasts until the next model has been asked for, and longer.
LONG = 300


@pytest.fixture
def yard(valkey_broker: Server) -> Iterator[LifeYard]:
    with LifeYard(valkey_broker.url) as started:
        yield started


def check_all_is_well(yard: LifeYard, host: Program, count: int, *models: str) -> None:
    """Check that all requests are answered, and that the whole pool serves all models."""
    yard.check_all()
    yard.check_whole(host, count)
    for model in models or ("red", "blue"):
        yard.ask(model, 2, max_tokens=5)
    yard.check_all()
    yard.check_whole(host, count)


def attempts_of(yard: LifeYard, requests: list[Request]) -> set[int]:
    answers = yard.check_all()
    return set(attempts([answers[request.id] for request in requests]))


class TestBeforeAModel:
    @pytest.mark.long
    def test_killed_warming_process_is_replaced(self, yard: LifeYard) -> None:
        # Given streams on one device, and a process that is still starting
        yard.coordinator(max_model_wait_s=MAX_MODEL_WAIT_S)
        host = yard.pool(slots=2, spares=1, crash_point="stall")
        eventually(lambda: len(yard.stalled()) == 3, timeout_s=WAIT_S)
        victim, *others = yard.stalled()
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        yard.flow("red")

        # If it is killed, and its successor may start
        yard.ask("blue")
        yard.kill(victim)
        yard.ask("red")
        (following,) = eventually(lambda: yard.stalled() - {victim}, timeout_s=WAIT_S)
        os.kill(following, signal.SIGCONT)

        check_all_is_well(yard, host, 3)

    @pytest.mark.long
    def test_killed_warm_process_is_replaced(self, yard: LifeYard) -> None:
        # Given streams on one device, and a warm process without a stand-in on the other
        host = yard.start(slots=2)
        yard.flow("red")

        # If the warm process is killed when a model needs its device
        yard.kill(yard.pid_of("warm"))
        yard.ask("blue")

        check_all_is_well(yard, host, 2)


class TestWithAModel:
    """One device, and a spare process for it."""

    @pytest.mark.long
    def test_killed_loading_process_is_replaced_by_the_spare(self, yard: LifeYard) -> None:
        # Given requests whose model is loading
        host = yard.start(spares=1, simulated_load_s=LOAD_S)
        before = yard.ask("red")
        loading = yard.seen("loading", "red").pid
        spare = yard.pid_of("warm")

        yard.kill(loading)
        yard.ask("red")

        # I expect the spare to load it, and no request to have reached the dead process.
        assert yard.seen("loading", "red", but={loading}).pid == spare
        assert yard.seen("ready", "red").pid == spare
        assert attempts_of(yard, before) == {1}
        check_all_is_well(yard, host, 2)

    @pytest.mark.long
    def test_spare_continues_the_streams_of_a_killed_ready_process(self, yard: LifeYard) -> None:
        # Given a busy worker
        host = yard.start(spares=1)
        before = yard.flow("red")
        ready, spare = yard.pid_of("ready", "red"), yard.pid_of("warm")

        yard.kill(ready)
        yard.ask("red")

        # I expect the spare to continue its streams.
        assert yard.seen("ready", "red", but={ready}).pid == spare
        assert attempts_of(yard, before) == {2}
        check_all_is_well(yard, host, 2)

    @pytest.mark.long
    def test_kill_of_a_draining_process_loads_the_next_model_immediately(
        self, yard: LifeYard
    ) -> None:
        # Given a busy worker whose device is to serve another model
        host = yard.start(spares=1)
        before = yard.flow("red", max_tokens=LONG)
        yard.ask("blue")
        draining, spare = yard.seen("draining", "red").pid, yard.pid_of("warm")

        yard.kill(draining)
        yard.ask("red")
        yard.ask("blue")

        # I expect that model to load immediately, and the streams to continue in their turn.
        assert yard.seen("ready", "blue").pid == spare
        assert attempts_of(yard, before) == {2}
        check_all_is_well(yard, host, 2)

    @pytest.mark.long
    def test_death_while_unloading_counts_as_no_crash(self, yard: LifeYard) -> None:
        # Given a worker that must unload before its streams end, and dies as it does
        host = yard.start(spares=1, crash_point="unloading", drain_timeout_s=0.2)
        before = yard.flow("red")
        victim, spare = yard.pid_of("ready", "red"), yard.pid_of("warm")
        yard.ask("blue")

        eventually(lambda: is_gone(victim), timeout_s=WAIT_S)
        yard.ask("red")

        # I expect no crash to be counted: it had handed its requests back.
        assert yard.seen("ready", "blue").pid == spare
        yard.check_all()
        assert not any("crashes" in yard.ledger(request.id) for request in before)
        check_all_is_well(yard, host, 2)


class TestAsleep:
    """One device, on which one engine may sleep beside the one that is awake."""

    @pytest.mark.long
    def test_model_of_a_killed_sleeper_is_loaded_from_its_files(self, yard: LifeYard) -> None:
        # Given a model that sleeps while another one is busy
        host = yard.start(sleepers=1)
        yard.flow("red")
        yard.flow("blue")
        asleep = yard.pid_of("asleep", "red")

        # If its process is killed, and a request asks for the model
        yard.kill(asleep)
        yard.ask("red")

        # I expect the model to be loaded from its files.
        assert "wake" not in yard.seen("ready", "red").phases_s
        check_all_is_well(yard, host, 2)

    @pytest.mark.long
    @pytest.mark.parametrize("place", ["asleep", "waking"])
    def test_death_on_the_way_to_sleep_or_awake_moves_the_model_to_another_process(
        self, yard: LifeYard, place: str
    ) -> None:
        # Given workers that die as they fall asleep, or as they wake
        host = yard.start(sleepers=1, crash_point=place)
        yard.flow("red")
        first = yard.pid_of("ready", "red")
        yard.flow("blue")

        # If the first model is asked for again
        yard.ask("red")

        # I expect another process to serve it.
        again = yard.seen("ready", "red", but={first})
        assert "wake" not in again.phases_s
        assert is_gone(first)
        yard.check_all()
        yard.check_whole(host, 2)


class TestGroup:
    """Two devices that serve one model together, and a spare."""

    @pytest.mark.long
    @pytest.mark.parametrize("state", ["ready", "attached"])
    def test_kill_in_a_serving_group_replaces_all_its_processes(
        self, yard: LifeYard, state: str
    ) -> None:
        # Given a busy group
        host = yard.start(slots=2, spares=1)
        before = yard.flow("pair")
        group = {yard.pid_of("ready", "pair"), yard.pid_of("attached", "pair")}

        # If its leader, or its follower, is killed
        yard.kill(yard.pid_of("ready" if state == "ready" else "attached", "pair"))
        yard.ask("pair")

        # I expect both to be replaced, and the next group to continue the streams.
        yard.seen("ready", "pair", but=group)
        yard.seen("attached", "pair", but=group)
        assert all(is_gone(pid) for pid in group)
        assert attempts_of(yard, before) == {2}
        check_all_is_well(yard, host, 3, "pair", "red", "blue")

    @pytest.mark.long
    @pytest.mark.parametrize("state", ["loading", "attached"])
    def test_kill_in_a_loading_group_forms_another_group(self, yard: LifeYard, state: str) -> None:
        # Given a group that is forming
        host = yard.start(slots=2, spares=1, simulated_load_s=LOAD_S)
        yard.ask("pair")
        leader = yard.seen("loading", "pair").pid
        follower = yard.seen("attached", "pair").pid

        yard.kill(leader if state == "loading" else follower)
        yard.ask("pair")

        # I expect another group to form.
        yard.seen("ready", "pair", but={leader, follower})
        assert is_gone(leader)
        assert is_gone(follower)
        check_all_is_well(yard, host, 3, "pair", "red")


class TestOthers:
    """Other processes that take part in a swap."""

    def test_killed_controller_returns_with_a_whole_pool(self, yard: LifeYard) -> None:
        # Given a device in the middle of a swap
        host = yard.start(spares=1)
        yard.flow("red", max_tokens=LONG)
        yard.ask("blue")
        yard.seen("draining", "red")
        left = [*host.children(), host.fork_server()]

        # If its controller is killed and started again
        host.kill()
        yard.ask("red")
        yard.ask("blue")
        eventually(lambda: all(is_gone(one.pid) for one in left), timeout_s=WAIT_S)
        yard.end_leases("host")
        again = yard.pool(spares=1)

        check_all_is_well(yard, again, 2)

    @pytest.mark.long
    def test_coordinator_killed_before_its_command_is_obeyed_loads_the_model_once(
        self, yard: LifeYard
    ) -> None:
        # Given a command that its controller has not yet seen
        leader = yard.coordinator(name="one")
        token = yard.wait_for_leader()
        host = yard.pool(spares=1)
        eventually(lambda: yard.states(host) == ["warm", "warm"], timeout_s=WAIT_S)
        controller = psutil.Process(host.pid)
        controller.suspend()
        yard.ask("red")
        eventually(lambda: yard.connection.xlen(yard.keys.control) == 1, timeout_s=WAIT_S)

        # If the coordinator is killed, and the next one commands again
        leader.kill()
        yard.end_lead()
        yard.coordinator(name="two", max_model_wait_s=MAX_MODEL_WAIT_S)
        yard.wait_for_leader(other_than=token)
        eventually(lambda: yard.connection.xlen(yard.keys.control) == 2, timeout_s=WAIT_S)
        yard.ask("red")
        controller.resume()

        # I expect both commands to load the model once.
        yard.check_all()
        assert yard.states(host) == ["ready", "warm"]
        check_all_is_well(yard, host, 2)

    @pytest.mark.long
    def test_coordinator_killed_during_a_load_uses_the_loaded_model(self, yard: LifeYard) -> None:
        # Given a model that is loading
        leader = yard.coordinator()
        host = yard.pool(spares=1, simulated_load_s=LOAD_S)
        before = yard.ask("red")
        yard.seen("loading", "red")

        # If the coordinator is killed, and started again once the model is loaded
        leader.kill()
        after = yard.ask("red")
        holder = yard.seen("ready", "red")
        yard.end_lead()
        yard.coordinator(max_model_wait_s=MAX_MODEL_WAIT_S)

        # I expect it to use the loaded model.
        assert attempts_of(yard, before + after) == {1}
        assert yard.seen("ready", "red").since_ms == holder.since_ms
        check_all_is_well(yard, host, 2)

    @pytest.mark.long
    def test_killed_fork_server_leaves_no_process_behind(self, yard: LifeYard) -> None:
        # Given a host with a busy worker
        host = yard.start(slots=2, spares=1)
        yard.flow("red")
        left = host.children()
        assert len(left) == 3

        # If the fork-server that started its processes is killed, so that they all look dead
        yard.kill(host.fork_server().pid)
        yard.ask("red")
        yard.ask("blue")

        # I expect none of them to remain.
        eventually(lambda: all(is_gone(one.pid) for one in left), timeout_s=WAIT_S)
        check_all_is_well(yard, host, 3)

    @pytest.mark.long
    def test_model_of_a_lost_host_is_loaded_on_another(self, yard: LifeYard) -> None:
        # Given two busy hosts, and more requests for one's model than its lane takes
        yard.coordinator(max_model_wait_s=MAX_MODEL_WAIT_S)
        hosts = {name: yard.pool(name=name, spares=1) for name in ("a", "b")}
        eventually(lambda: len(yard.roster()) == 4, timeout_s=WAIT_S)
        before = yard.flow("red", 8, max_tokens=LONG)
        yard.flow("blue")
        yard.ask("red", 8)
        lost = yard.seen("ready", "red").controller
        assert lost != yard.seen("ready", "blue").controller

        # If that host is lost
        hosts.pop(lost).end()
        yard.end_leases(lost)

        # I expect the other host to load that model.
        (left,) = hosts.values()
        assert attempts_of(yard, before) == {2}
        check_all_is_well(yard, left, 2)


class TestBrokenModel:
    @pytest.mark.long
    def test_its_requests_fail_with_the_reason_and_others_continue(self, yard: LifeYard) -> None:
        # Given streams on one device
        host = yard.start(slots=2, spares=1)
        yard.flow("red")

        # If requests ask for a model that cannot be loaded
        torn = yard.ask("torn", 3)
        del yard.asked[-3:]
        yard.ask("blue")

        # I expect its requests to fail with the reason, and the others to be answered.
        for result in yard.results(torn, timeout_s=WAIT_S):
            assert result.error is not None
            assert result.error.code == "MODEL_UNAVAILABLE"
            assert "broken model" in result.error.message
        check_all_is_well(yard, host, 3)
