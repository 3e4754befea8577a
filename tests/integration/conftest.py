"""Fixtures of the integration tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from tests.integration.local_pool import START_S, Start
from tests.integration.operating import Command, NewHost, Opened, Operator
from tests.integration.played_host import PlayedHost
from tests.support.brokers import Cluster
from tests.support.hosts import Host, processes
from tests.support.lanes import Lanes
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.watched import Keep
from tests.support.yard import PlayedYard
from tokenyard.cli import main
from tokenyard.ops.control import Signals
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts
from worker import WorkerController


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Starts servers and ends them after the test."""
    kept: list[Server | Cluster] = []

    def start(server: Server | Cluster) -> None:
        kept.append(server)
        server.start()

    yield start
    for server in reversed(kept):
        server.stop()


@pytest.fixture
def opened(broker: Server) -> Iterator[Opened]:
    """Opens a yard of a class, and closes it after the test."""
    with ExitStack() as stack:
        yield lambda kind: stack.enter_context(kind(broker.url))


@pytest.fixture
def lanes(opened: Opened) -> Lanes:
    """A yard whose workers are played by the test."""
    return opened(Lanes)


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, scripts: Scripts) -> PlayedYard:
    """A yard whose leader and workers are calls of scripts."""
    return PlayedYard(connection, keys, scripts)


@pytest.fixture
def new_host(plant: Plant, tmp_path: Path) -> NewHost:
    """Start a host, and wait until all its processes are warm."""

    def start(**options: object) -> Host:
        host = Host(plant, tmp_path, **options)
        count = processes(options)
        names = [f"host-{number}" for number in range(count)] if count > 1 else ["host"]
        host.wait("warm", *names)
        return host

    return start


@pytest.fixture
def led_host(plant: Plant, new_host: NewHost) -> NewHost:
    """Start a host of slow engines, and a coordinator that commands nothing by itself."""

    def start(**options: object) -> Host:
        plant.coordinator(static=True)
        return new_host(simulated_step_s=0.02, **options)

    return start


@pytest.fixture
def operator(plant: Plant) -> Operator:
    return Operator(plant)


@pytest.fixture
def command(broker: Server, keys: Keys) -> Command:
    """Runs a command on the test's yard, for an operator with a narrow terminal."""

    def run(*words: str, **env: str) -> Result:
        options = ["--redis-url", broker.url, "--yard", keys.yard]
        known = {"COLUMNS": "80", "TOKENYARD_OPERATOR": "kim@north"}
        return CliRunner().invoke(main, [*options, *words], env=known | env)

    return run


@pytest.fixture
def signals(connection: redis.Redis, keys: Keys) -> Signals:
    return Signals(Yard(connection, keys))


@pytest.fixture
def host(scripts: Scripts, connection: redis.Redis, keys: Keys) -> PlayedHost:
    return PlayedHost(scripts, connection, keys)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start controllers of a program's own simulated engines, and stop them after the test."""
    started: list[WorkerController] = []

    def make(models: Any = None, **options: Any) -> WorkerController:
        defaults = {"engine": "simulated", "timeout_s": START_S, "backoff_s": 0.01, "grace_s": 0.0}
        controller = WorkerController(models, **(defaults | options))
        started.append(controller)
        controller.start()
        return controller

    yield make
    for controller in started:
        controller.stop()


@pytest.fixture
def kill_a_worker(plant: Plant) -> Callable[[], None]:
    """Kills one of two workers of the test's plant."""

    def kill() -> None:
        workers = plant.wait_for_workers(2)
        os.kill(min(workers.values(), key=lambda info: info.pid).pid, signal.SIGKILL)

    return kill
