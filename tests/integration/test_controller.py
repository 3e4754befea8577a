"""A controller and its processes: joining, draining, handing back, stopping."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.support.processes import ROOT, Plant
from tests.support.servers import Server, free_port
from tests.support.streams import begun, streams
from tests.support.waiting import eventually
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.wire import Request
from worker.host.controller import Controller


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
            assert (info.max_num_seqs, info.lane_limit) == (8, 10)
            assert abs(info.started_ms / 1000 - time.time()) < 60

    def test_a_controller_waits_for_a_server_that_starts_later(self, own_broker: Server) -> None:
        own_broker.stop()
        with Plant(own_broker.url) as plant:
            controller = plant.worker()
            eventually(lambda: "reading the desired states: " in controller.log)

            own_broker.start()

            plant.wait_for_workers(1)


class TestDraining:
    @pytest.mark.long
    def test_running_requests_finish(self, plant: Plant) -> None:
        # Given two hosts with running streams
        plant.coordinator()
        plant.worker(name="stays", simulated_step_s=0.02)
        leaving = plant.worker(name="leaves", simulated_step_s=0.02)
        workers = plant.wait_for_workers(2)
        requests = begun(plant, 6, 300)
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
        controller = plant.worker(slots=2, grace_s=600)
        plant.wait_for_workers(2)

        assert controller.stop() == 0

        assert not plant.connection.exists(plant.keys.leases)

    @pytest.mark.long
    def test_without_grace_requests_are_handed_back(self, plant: Plant) -> None:
        # Given a host with long streams
        leaving = plant.up(name="leaves", simulated_step_s=0.05, grace_s=0)
        requests = begun(plant, 4, 100)

        # If it is told to stop without grace, and another host comes
        assert leaving.stop() == 0
        plant.worker(name="comes", simulated_step_s=0.001)

        # I expect the streams to continue there, and no worker to be counted as dead.
        results = plant.results(requests)
        for request, result in zip(requests, results, strict=True):
            assert (result.provenance.attempt, result.seq > 0) == (2, True)
            assert plant.ledger(request.id).get("crashes", "0") == "0"
            plant.answer(request.id).check_stream()

    @pytest.mark.long
    def test_sigint_drains_too(self, plant: Plant) -> None:
        leaving = plant.up(simulated_step_s=0.02)
        requests = begun(plant, 2, 30)

        # Ctrl-C in a terminal reaches the processes too
        for pid in (leaving.pid, *(child.pid for child in leaving.children())):
            psutil.Process(pid).send_signal(signal.SIGINT)

        assert leaving.wait() == 0
        assert all(result.ok for result in plant.results(requests))


class TestStopping:
    def _controller(self) -> Controller:
        url = f"redis://127.0.0.1:{free_port()}"
        return Controller(WorkerSettings(redis_url=url, engine="simulated"))

    def test_a_controller_stops_while_a_process_starts(self, plant: Plant) -> None:
        controller = plant.worker(slots=2)
        eventually(lambda: len(controller.children()) == 2)

        assert controller.stop() == 0

        assert not plant.connection.exists(plant.keys.leases)

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

        thread.join(60.0)
        assert not thread.is_alive()


#: A worker process in which a thread fails, as its reader or publisher might.
FAULTY = """
import logging, os, threading, time
from multiprocessing.connection import Connection
from tokenyard.protocol.settings import WorkerSettings
from worker.process import main as process

def run(self):
    threading.Thread(target=lambda: 1 / 0).start()
    time.sleep(600)

process.WorkerProcess.run = run
settings = WorkerSettings(redis_url="redis://x", engine="simulated")
process.main(settings, 0, logging.INFO, None, Connection(os.dup(2)), "", False)
"""


def test_a_thread_that_fails_ends_its_process() -> None:
    # Otherwise it would hold its lease forever and read nothing.
    ended = subprocess.run(
        [sys.executable, "-c", FAULTY], cwd=ROOT, capture_output=True, check=False, timeout=60.0
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
