"""`tokenyard up`: a whole yard starts, serves, survives deaths, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import urllib.request
from typing import Any

import psutil
import pytest
import redis

from tests.cli.conftest import SLOW
from tests.cli.running import StartUp
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.client.sync import Client
from tokenyard.process.program import Exit
from tokenyard.process.running import running_up
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.yard.snapshot import read_yard


def test_up_prints_when_it_is_ready_and_serves(yard: dict[str, Any]) -> None:
    assert set(yard["pids"]) == {"broker", "coordinator", "worker", "board"}
    assert all(psutil.pid_exists(pid) for pid in yard["pids"].values())
    with Client(yard["url"], yard=yard["yard"]) as client:
        assert client.submit("hello", max_tokens=3).result(timeout=30).tokens


def test_processes_have_distinct_titles(yard: dict[str, Any]) -> None:
    titles = {part: " ".join(psutil.Process(pid).cmdline()) for part, pid in yard["pids"].items()}
    assert titles["coordinator"].startswith("tokenyard coordinator main")
    assert titles["worker"].startswith("tokenyard worker main")


def test_without_a_gateway_the_board_runs_by_itself(yard: dict[str, Any]) -> None:
    assert yard["http_url"] is None
    with urllib.request.urlopen(f"{yard['board_url']}/audit", timeout=30) as answer:
        assert (answer.status, b"<h1>Audit</h1>" in answer.read()) == (200, True)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_processes_in_order(start_up: StartUp, number: signal.Signals) -> None:
    up = start_up("--workers", "1")
    up.wait_ready()
    assert running_up(up.data_dir)
    up.signal(number)
    assert up.wait() == Exit.OK
    up.wait_all_gone()
    assert "Stopped." in up.said
    assert running_up(up.data_dir) is None


def test_a_signal_during_the_start_stops_all_processes(start_up: StartUp) -> None:
    up = start_up()
    eventually(lambda: "Starting" in up.said, timeout_s=30)
    up.family = [child.pid for child in psutil.Process(up.process.pid).children(recursive=True)]
    up.signal(signal.SIGTERM)
    assert up.wait() == Exit.OK, up.said
    up.wait_all_gone()


@pytest.mark.long
def test_running_requests_finish_before_up_stops(start_up: StartUp) -> None:
    up = start_up("--workers", "1", env=SLOW)
    url = str(up.wait_ready()["url"])
    with redis.Redis.from_url(url) as connection, Client(url) as client:
        handle = client.submit("long", max_tokens=100, stream=True)
        next(iter(handle))
        up.signal(signal.SIGINT)
        assert len(handle.result(timeout=20).tokens) == 100
        assert connection  # the broker ends last
    assert up.wait() == Exit.OK


@pytest.mark.long
def test_accepted_requests_survive_a_restart(start_up: StartUp) -> None:
    first = start_up("--workers", "1", "--grace-s", "0.2", env=SLOW)
    with Client(str(first.wait_ready()["url"]), client_id="ann") as client:
        handle = client.submit("long", id="q1", max_tokens=200, stream=True)
        next(iter(handle))
        first.signal(signal.SIGTERM)
        first.wait()
    second = start_up("--workers", "1", env=SLOW, data_dir=first.data_dir)
    url = str(second.wait_ready()["url"])
    with Client(url, client_id="ann") as client:
        assert len(client.attach("q1").result(timeout=30).tokens) == 200
    # What the first had listed is not what this yard serves.
    with redis.Redis.from_url(url) as connection:
        assert connection.hlen(Keys("main").hosts) == 1


@pytest.mark.long
@pytest.mark.crash
def test_a_killed_up_leaves_no_process_behind(start_up: StartUp) -> None:
    up = start_up()
    up.wait_ready()
    up.signal(signal.SIGKILL)
    up.wait()
    up.wait_all_gone()


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize("part", ["coordinator", "worker"])
def test_a_killed_part_is_started_again(start_up: StartUp, part: str) -> None:
    up = start_up("--workers", "1")
    ready: dict[str, Any] = up.wait_ready()
    os.kill(ready["pids"][part], signal.SIGKILL)
    eventually(lambda: "has ended, status -9" in up.said)
    with Client(ready["url"], connect_timeout_s=30) as client:
        assert client.submit("hello", max_tokens=3).result(timeout=60).tokens
    up.signal(signal.SIGTERM)
    assert up.wait() == Exit.OK
    up.wait_all_gone()


@pytest.mark.long
@pytest.mark.crash
def test_up_ends_without_its_broker(start_up: StartUp) -> None:
    up = start_up("--workers", "1", "--grace-s", "1")
    ready: dict[str, Any] = up.wait_ready()
    os.kill(ready["pids"]["broker"], signal.SIGKILL)
    assert up.wait() == Exit.FAILED
    assert "the broker has ended" in up.said
    up.wait_all_gone()


@pytest.mark.long
def test_a_part_that_cannot_run_ends_up(start_up: StartUp) -> None:
    up = start_up(env={"TOKENYARD_COORDINATOR_LEASE_MS": "1"})
    assert up.wait() == Exit.FAILED
    assert "the coordinator has ended for good" in up.said
    assert "lease_ms: must be at least 500" in up.said


@pytest.mark.long
def test_up_warns_of_a_foreign_redis(
    start_up: StartUp, broker: Server, connection: redis.Redis, keys: Keys
) -> None:
    up = start_up("--workers", "1", group=("--redis-url", broker.url, "--yard", keys.yard))
    ready: dict[str, Any] = up.wait_ready()
    assert ready["url"] == broker.url
    assert "broker" not in ready["pids"]
    assert "Set appendonly yes." in up.said
    assert read_yard(Yard(connection, keys)).ready_workers == 1
    up.signal(signal.SIGTERM)
    assert up.wait() == Exit.OK
    assert connection.ping()
    assert read_yard(Yard(connection, keys)).leader is None
