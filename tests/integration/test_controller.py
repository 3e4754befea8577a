"""A controller and its processes: joining, draining, handing back, restarting."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.builders import make_request
from tests.support.processes import ROOT, Plant, Program
from tests.support.servers import Server, free_port
from tests.support.waiting import eventually
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.wire import Request, SamplingParams
from worker.host.controller import Controller


@pytest.fixture
def plant(valkey_broker: Server) -> Iterator[Plant]:
    with Plant(valkey_broker.url) as started:
        yield started


def streams(count: int, max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [make_request(tokens=[n + 1, n + 2], stream=True, params=params) for n in range(count)]


def started(plant: Plant, requests: list[Request]) -> None:
    """Push requests, and wait until all of them run."""
    plant.push_all(requests)
    eventually(lambda: all(plant.published(request.id) >= 2 for request in requests))


class TestJoining:
    def test_a_worker_joins_with_its_roster_entry(self, plant: Plant) -> None:
        controller = plant.worker(name="host", slots=2, max_num_seqs=8)
        roster = plant.wait_for_workers(2)

        assert {info.name for info in roster.values()} == {"host-0", "host-1"}
        assert {info.pid for info in roster.values()} == {
            child.pid for child in controller.children()
        }
        for info in roster.values():
            assert (info.state, info.model, info.engine) == ("ready", "sim", "simulated")
            assert (info.slots, info.lane_limit) == (8, 10)
            assert abs(info.started_ms / 1000 - time.time()) < 60

    def test_a_single_slot_has_the_plain_name(self, plant: Plant) -> None:
        plant.worker(name="host")

        (info,) = plant.wait_for_workers(1).values()
        assert info.name == "host"

    def test_leases_are_renewed_beyond_their_length(self, plant: Plant) -> None:
        plant.coordinator()
        plant.worker(lease_ms=1000)
        roster = plant.wait_for_workers(1)
        (worker,) = roster
        first = plant.connection.zscore(plant.keys.leases, worker)

        eventually(lambda: plant.connection.zscore(plant.keys.leases, worker) > first + 1500)

        assert plant.roster().keys() == roster.keys()

    def test_a_controller_waits_for_a_server_that_starts_later(self, own_broker: Server) -> None:
        own_broker.stop()
        with Plant(own_broker.url) as plant:
            controller = plant.worker()
            eventually(lambda: "reading the desired states: " in controller.log, timeout_s=30.0)

            own_broker.start()

            plant.wait_for_workers(1)

    def test_an_engine_that_cannot_start_is_tried_again(self, plant: Plant) -> None:
        # Given an engine that fails each time
        controller = plant.worker(crash_point="nowhere", backoff_s=0.01, on_start_failure="retry")

        eventually(lambda: controller.log.count("process died (exit status 1") >= 2)

        assert "unknown crash point 'nowhere'" in controller.log
        assert "engine simulated is up" not in controller.log
        assert controller.stop() == 0
        assert not plant.roster()


class TestDraining:
    def test_running_requests_finish(self, plant: Plant) -> None:
        # Given two hosts with running streams
        plant.coordinator()
        plant.worker(name="stays", simulated_step_s=0.02)
        leaving = plant.worker(name="leaves", simulated_step_s=0.02)
        workers = plant.wait_for_workers(2)
        requests = streams(6, 150)
        started(plant, requests)
        (worker,) = (worker for worker, info in workers.items() if info.name == "leaves")

        # If one is told to stop
        leaving.signal(signal.SIGTERM)
        eventually(lambda: _state(plant, worker) == "draining")

        # I expect new streams to go to the other while its own continue,
        eventually(lambda: _served(plant, streams(4, 1)) == {"stays"})
        assert leaving.is_running

        # all to finish where they ran, at the first attempt,
        assert {result.provenance.attempt for result in plant.results(requests)} == {1}
        assert _served(plant, requests, push=False) == {"stays", "leaves"}

        # and the host to leave in order.
        assert leaving.wait() == 0
        assert worker not in plant.roster()
        assert not plant.connection.exists(plant.keys.lane(worker))
        assert not leaving.children()

    def test_idle_workers_leave_immediately(self, plant: Plant) -> None:
        controller = plant.worker(slots=2)
        plant.wait_for_workers(2)
        asked = time.monotonic()

        assert controller.stop() == 0

        assert time.monotonic() - asked < 3.0
        assert not plant.connection.exists(plant.keys.leases)

    def test_without_grace_requests_are_handed_back(self, plant: Plant) -> None:
        # Given a host with long streams
        plant.coordinator()
        leaving = plant.worker(name="leaves", simulated_step_s=0.05, grace_s=0)
        plant.wait_for_workers(1)
        requests = streams(4, 40)
        started(plant, requests)

        # If it is told to stop without grace, and another host comes
        assert leaving.stop() == 0
        plant.worker(name="comes", simulated_step_s=0.001)

        # I expect the streams to continue there, and no worker to be counted as dead.
        results = plant.results(requests)
        for request, result in zip(requests, results, strict=True):
            assert (result.provenance.attempt, result.seq > 0) == (2, True)
            assert plant.ledger(request.id).get("crashes", "0") == "0"
            plant.answer(request.id).check_stream()

    def test_a_second_signal_stops_immediately(self, plant: Plant) -> None:
        # Given a host that drains, which may take minutes
        plant.coordinator()
        leaving = plant.worker(simulated_step_s=0.2, grace_s=600, max_num_seqs=4)
        (worker,) = plant.wait_for_workers(1)
        requests = streams(3, 1000)
        started(plant, requests)
        leaving.signal(signal.SIGTERM)
        eventually(lambda: _state(plant, worker) == "draining")
        asked = time.monotonic()

        # If it is signalled again
        assert leaving.stop() == 0

        # I expect it to stop immediately and to hand back its requests.
        assert time.monotonic() - asked < 5.0
        eventually(lambda: plant.connection.xlen(plant.keys.intake("retry")) == 3)
        assert {plant.ledger(one.id).get("crashes", "0") for one in requests} == {"0"}

    def test_a_drain_ends_with_its_grace(self, plant: Plant) -> None:
        plant.coordinator()
        leaving = plant.worker(simulated_step_s=0.2, grace_s=1.0)
        plant.wait_for_workers(1)
        started(plant, streams(1, 1000))
        asked = time.monotonic()

        assert leaving.stop() == 0

        assert 0.9 < time.monotonic() - asked < 5.0

    def test_sigint_drains_too(self, plant: Plant) -> None:
        plant.coordinator()
        leaving = plant.worker(simulated_step_s=0.02)
        plant.wait_for_workers(1)
        requests = streams(2, 30)
        started(plant, requests)

        # Ctrl-C in a terminal reaches the processes too
        for pid in (leaving.pid, *(child.pid for child in leaving.children())):
            psutil.Process(pid).send_signal(signal.SIGINT)

        assert leaving.wait() == 0
        assert all(result.ok for result in plant.results(requests, timeout_s=1.0))


class TestRestarting:
    def test_an_idle_process_that_dies_is_started_again(self, plant: Plant) -> None:
        plant.coordinator()
        controller = plant.worker()
        first = plant.wait_for_workers(1)
        (died,) = controller.children()

        died.kill()

        eventually(lambda: plant.roster().keys().isdisjoint(first))
        again = plant.wait_for_workers(1)
        assert again.keys().isdisjoint(first)
        request = make_request()
        plant.push(request)
        assert plant.result(request.id).ok

    def test_pauses_between_starts_grow(self, plant: Plant) -> None:
        # Given a process that dies in its first step, again and again
        plant.coordinator(max_crashes=100)
        controller = plant.worker(crash_point="before_step", backoff_s=0.2, max_backoff_s=60.0)
        plant.wait_for_workers(1)
        plant.push(make_request())

        eventually(
            lambda: controller.log.count("process died (ended by SIGKILL)") >= 3, timeout_s=60.0
        )

        assert _restarts(controller) <= 4

    def test_a_controller_stops_while_a_process_starts(self, plant: Plant) -> None:
        controller = plant.worker(slots=2)
        eventually(lambda: len(controller.children()) == 2)

        assert controller.stop() == 0

        assert not plant.connection.exists(plant.keys.leases)


class TestStopping:
    def _controller(self) -> Controller:
        url = f"redis://127.0.0.1:{free_port()}"
        return Controller(WorkerSettings(redis_url=url, engine="simulated"))

    def test_a_stop_before_the_run_ends_it(self) -> None:
        controller = self._controller()
        controller.stop()
        controller.stop()

        assert controller.run() == 0

    def test_a_controller_stops_without_a_server(self) -> None:
        controller = self._controller()
        thread = threading.Thread(target=controller.run)
        thread.start()

        controller.stop()

        thread.join(20.0)
        assert not thread.is_alive()


#: A worker process in which a thread fails, as its reader or publisher might.
FAULTY = """
import logging, os, threading, time
from multiprocessing.connection import Connection
from tokenyard.protocol.settings import WorkerSettings
from worker.process import main as process

def run(self):
    threading.Thread(target=lambda: 1 / 0).start()
    time.sleep(60)

process.WorkerProcess.run = run
settings = WorkerSettings(redis_url="redis://x", engine="simulated")
process.main(process.ProcessArguments(settings, 0, logging.INFO), None, Connection(os.dup(2)))
"""


def test_a_thread_that_fails_ends_its_process() -> None:
    # Otherwise it would hold its lease forever and read nothing.
    ended = subprocess.run(
        [sys.executable, "-c", FAULTY], cwd=ROOT, capture_output=True, check=False, timeout=30.0
    )

    assert ended.returncode == 1
    assert b"ends the process" in ended.stderr
    assert b"ZeroDivisionError" in ended.stderr


def _state(plant: Plant, worker: str) -> str:
    info = plant.roster().get(worker)
    return info.state if info else "gone"


def _served(plant: Plant, requests: list[Request], *, push: bool = True) -> set[str]:
    """The names of the workers that answer the requests."""
    if push:
        plant.push_all(requests)
    results = plant.results(requests)
    assert all(result.ok for result in results)
    return {result.provenance.worker.partition(".")[0] for result in results}


def _restarts(controller: Program) -> int:
    return controller.log.count("starts")
