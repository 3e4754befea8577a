"""A coordinator and a controller in processes of one's own program."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

import coordinator
import worker
from tests.docs.pages import code, page, section
from tests.support.builders import random_name
from tests.support.servers import Server, free_port
from tests.support.unwritable import Ailing
from tests.support.vllm_versions import write_distribution
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.process.embedding import ServiceAddress, wait_started
from tokenyard.protocol.errors import NotStarted, SettingsError, WaitTimeout
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings

ROOT = Path(__file__).parents[2]
METHODS = ("spawn", "forkserver", "fork")
START_S = 60.0


class Family:
    """Processes of a test, their pipes and events."""

    def __init__(self) -> None:
        self._all: list[BaseProcess] = []

    def start(
        self, target: Callable[..., Any], settings: Any, method: str = "spawn", **more: Any
    ) -> tuple[BaseProcess, Connection, Any]:
        context: Any = multiprocessing.get_context(method)
        ours, theirs = context.Pipe(duplex=False)
        ready = context.Event()
        options = {"ready_event": ready, "pipe": theirs, "settings": settings} | more
        process = context.Process(target=target, kwargs=options)
        process.start()
        theirs.close()
        self._all.append(process)
        return process, ours, ready

    def does_not_start(self, target: Callable[..., Any], settings: Any, why: str) -> BaseProcess:
        """Start one, and check that whoever waits for it is told why it does not come up."""
        process, pipe, ready = self.start(target, settings)
        with pytest.raises(NotStarted, match=why):
            wait_started(process, pipe, START_S)
        assert not ready.is_set()
        return process

    def end(self) -> None:
        for process in self._all:
            process.terminate()
            process.join(20.0)
            if process.exitcode is None:
                process.kill()
                process.join(20.0)


@pytest.fixture
def family() -> Iterator[Family]:
    started = Family()
    yield started
    started.end()


@pytest.fixture
def leading(valkey_broker: Server) -> CoordinatorSettings:
    """Settings of a coordinator of a new yard."""
    return CoordinatorSettings(redis_url=valkey_broker.url, yard=random_name("yard"), name="north")


def working(leading: CoordinatorSettings, **more: Any) -> WorkerSettings:
    """Settings of a controller in the same yard."""
    url = leading.redis_url
    return WorkerSettings(
        redis_url=url, yard=leading.yard, engine="simulated", name="w", grace_s=0.0, **more
    )


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_yard_in_ones_own_processes(
    family: Family, leading: CoordinatorSettings, method: str
) -> None:
    # Given a coordinator and a controller as children
    first, from_first, first_ready = family.start(coordinator.entrypoint, leading, method)
    north = wait_started(first, from_first, START_S)
    second, from_second, second_ready = family.start(
        worker.entrypoint, working(leading, slots=2), method
    )
    host = wait_started(second, from_second, START_S)

    # I expect them to say where they are, and a request to be answered,
    assert first_ready.wait(START_S)
    assert second_ready.wait(START_S)
    assert north == ServiceAddress(
        role="coordinator",
        redis_url=leading.redis_url,
        yard=leading.yard,
        name="north",
        pid=first.pid or 0,
        epoch=1,
    )
    assert (north.leads, host.leads) == (True, False)
    assert (host.role, host.name, host.pid) == ("worker", "w", second.pid)
    assert sorted(name.partition(".")[0] for name in host.workers) == ["w-0", "w-1"]
    with Client(leading.redis_url, yard=leading.yard) as client:
        assert client.submit("hello", max_tokens=3).result(timeout=START_S).tokens

    # and both to stop in order.
    for process in (second, first):
        process.terminate()
        process.join(START_S)
        assert process.exitcode == 0
    with redis.Redis.from_url(leading.redis_url) as connection:
        keys = Keys(leading.yard)
        assert not connection.exists(keys.leader, keys.workers)


@pytest.mark.long
def test_a_second_coordinator_stands_by(family: Family, leading: CoordinatorSettings) -> None:
    one, from_one, _ = family.start(coordinator.entrypoint, leading)
    assert wait_started(one, from_one, START_S).leads

    two, from_two, ready = family.start(coordinator.entrypoint, replace(leading, name="south"))

    assert not wait_started(two, from_two, START_S).leads
    assert ready.wait(START_S)


def test_no_secret_travels(family: Family, own_broker: Server) -> None:
    with redis.Redis(port=own_broker.port) as connection:
        connection.execute_command("ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all")
    url = f"redis://ann:secret@127.0.0.1:{own_broker.port}/0"

    process, pipe, _ = family.start(coordinator.entrypoint, CoordinatorSettings(redis_url=url))

    assert wait_started(process, pipe, START_S).redis_url == url.replace("ann:secret@", "")


class TestFailing:
    """Whoever waits is told why it does not come up."""

    def test_no_broker(self, family: Family) -> None:
        settings = CoordinatorSettings(redis_url=f"redis://127.0.0.1:{free_port()}")

        why = r"BrokerUnavailable: .* does not answer"
        process = family.does_not_start(coordinator.entrypoint, settings, why)

        process.join(START_S)
        assert process.exitcode == 1

    @pytest.mark.long
    def test_a_broker_that_takes_no_writes(self, family: Family, tmp_path: Path) -> None:
        server = Ailing("valkey", tmp_path)
        server.start()
        server.fall_ill("replica")
        try:
            settings = CoordinatorSettings(redis_url=server.url)
            why = r"BrokerNotWritable: .*\(READONLY\)"
            family.does_not_start(coordinator.entrypoint, settings, why)
        finally:
            server.kill()

    def test_a_device_that_cannot_be_had(
        self,
        family: Family,
        leading: CoordinatorSettings,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # Given the build of vLLM for the CPU
        write_distribution(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        settings = replace(
            working(leading), engine="vllm", model=str(tmp_path), device="cuda", model_name=""
        )
        family.does_not_start(worker.entrypoint, settings, r"SettingsError: .*cuda")

    def test_a_process_that_is_killed(self, family: Family, leading: CoordinatorSettings) -> None:
        # Given a controller whose model takes long to load
        settings = working(leading, simulated_load_s=300.0)
        process, pipe, _ = family.start(worker.entrypoint, settings)
        with pytest.raises(WaitTimeout, match=r"is not ready within 0\.1 s"):
            wait_started(process, pipe, 0.1)

        process.kill()

        with pytest.raises(NotStarted, match=r"has ended before it was ready \(-9\)"):
            wait_started(process, pipe, START_S)

    def test_one_that_is_stopped_before_it_is_up(
        self, family: Family, leading: CoordinatorSettings
    ) -> None:
        settings = working(leading, simulated_load_s=300.0, start_timeout_s=600.0)
        process, pipe, _ = family.start(worker.entrypoint, settings)
        with redis.Redis.from_url(leading.redis_url) as connection:
            eventually(lambda: connection.exists(Keys(leading.yard).workers), timeout_s=START_S)

        process.terminate()

        with pytest.raises(NotStarted, match="it was stopped before it was ready"):
            wait_started(process, pipe, START_S)

    def test_a_daemonic_process_can_have_no_workers(
        self, leading: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from worker.host.controller import EmbeddedController

        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)

        with pytest.raises(SettingsError, match="daemon=True"):
            EmbeddedController(working(leading))


def test_nobody_need_listen(family: Family, leading: CoordinatorSettings) -> None:
    # Given a pipe whose other end is gone
    process, pipe, ready = family.start(coordinator.entrypoint, leading)
    pipe.close()

    assert ready.wait(START_S)
    process.terminate()
    process.join(START_S)
    assert process.exitcode == 0


PARENT = """
import multiprocessing, sys
from tokenyard.process.embedding import wait_started
from tokenyard.protocol.settings import CoordinatorSettings
import coordinator
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    settings = CoordinatorSettings(redis_url=sys.argv[1], yard=sys.argv[2])
    process = context.Process(
        target=coordinator.entrypoint,
        kwargs=dict(settings=settings, pipe=theirs, die_with_parent=sys.argv[3] == "yes"),
    )
    process.start()
    print(wait_started(process, ours, 60).pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize("choice", ["yes", "no"])
def test_it_ends_with_its_parent_or_not(valkey_broker: Server, choice: str) -> None:
    # Given a program with a coordinator
    yard = random_name("yard")
    command = [sys.executable, "-c", PARENT, valkey_broker.url, yard, choice]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))

        # If it is killed
        parent.kill()
        parent.wait()

    # I expect the coordinator to give the lead up and end, or to go on.
    keys = Keys(yard)
    with redis.Redis.from_url(valkey_broker.url) as connection, contextlib.ExitStack() as clean:
        clean.callback(lambda: child.is_running() and os.kill(child.pid, signal.SIGTERM))
        if choice == "yes":
            eventually(lambda: not connection.exists(keys.leader), timeout_s=START_S)
            eventually(lambda: not child.is_running(), timeout_s=START_S)
        else:
            held = connection.pttl(keys.leader)
            eventually(lambda: connection.pttl(keys.leader) > held, timeout_s=START_S)
            assert child.is_running()
            child.terminate()
            eventually(lambda: not child.is_running(), timeout_s=START_S)


@pytest.mark.long
def test_the_example_of_the_page(valkey_broker: Server, tmp_path: Path) -> None:
    # Given the block as it is printed, with the test's server for the usual one
    [example] = code(section(page("docs/run.md"), "## From Python"), "python")
    usual = '"redis://localhost:6379"'
    assert example.count(usual) == 1
    script = tmp_path / "example.py"
    script.write_text(example.replace(usual, repr(valkey_broker.url)))
    env = {name: value for name, value in os.environ.items() if "TOKENYARD_W" not in name}

    done = subprocess.run(
        [sys.executable, str(script)],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * START_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    first, second, answer = done.stdout.splitlines()
    assert first.startswith("ServiceAddress(role='coordinator', ")
    assert second.startswith("ServiceAddress(role='worker', ")
    assert answer
