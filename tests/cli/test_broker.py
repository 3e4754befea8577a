"""The embedded broker: its promises and its clean end."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.cli.running import ROOT, write_program
from tests.support.processes import is_gone
from tests.support.waiting import eventually
from tokenyard.process import embedded_broker as broker
from tokenyard.process.children import start_child
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.protocol.errors import BrokerUnavailable


def connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True, socket_timeout=30.0)


def test_it_persists_every_write_and_evicts_no_key(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "data") as started, connect(started.url) as connection:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "bind": "127.0.0.1",
            "save": "",
            "rdbcompression": "no",
            "dir": str(tmp_path / "data"),
        }
        assert connection.config_get(*wanted) == wanted
        assert connection.info("server")["process_id"] == started.pid
        # Half of the memory here, so that a rewrite of the file has as much.
        assert connection.config_get("maxmemory") == {"maxmemory": str(broker._room())}


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, limit = broker._room(), tmp_path / "memory.max"
    monkeypatch.setattr(broker, "_OF_CONTAINER", limit)
    assert broker._room() >= whole
    limit.write_text("1048576\n")
    assert broker._room() == 524_288
    limit.write_text("max\n")
    assert broker._room() >= whole


@pytest.mark.parametrize("given", ["", "glibc.malloc.tcache_count=9"])
def test_its_allocator_is_set_unless_the_user_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Given a server that prints its environment, I expect Tokenyard's value or the user's."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    server = write_program(tmp_path / "server", 'echo "$GLIBC_TUNABLES"')
    with pytest.raises(BrokerUnavailable, match=given or "mxfast=0:.*tcache_count=500"):
        EmbeddedBroker(tmp_path / "data", server=server).start()


def test_data_survives_a_stop(tmp_path: Path) -> None:
    embedded = EmbeddedBroker(tmp_path)
    with embedded, connect(embedded.url) as connection:
        connection.set("kept", "yes")
    with embedded, connect(embedded.url) as connection:
        assert connection.get("kept") == "yes"


def test_stop_may_come_twice_and_before_start(tmp_path: Path) -> None:
    embedded = EmbeddedBroker(tmp_path)
    embedded.stop()
    embedded.start()
    pid = embedded.pid
    embedded.stop()
    embedded.stop()
    assert is_gone(pid)
    assert not embedded.is_running
    assert embedded.pid == 0


def test_starting_twice_changes_nothing(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as embedded:
        pid = embedded.pid
        assert embedded.start() == embedded.url
        assert embedded.pid == pid


@pytest.mark.long
def test_a_stolen_port_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        taken = thief.getsockname()[1]
        ports = iter([taken, broker.free_port()])
        monkeypatch.setattr(broker, "free_port", lambda: next(ports))
        with EmbeddedBroker(tmp_path) as embedded, connect(embedded.url) as connection:
            assert connection.ping()
            assert str(taken) not in embedded.url


def test_a_taken_requested_port_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        embedded = EmbeddedBroker(tmp_path, port=thief.getsockname()[1])
        with pytest.raises(BrokerUnavailable, match="in use"):
            embedded.start()
    assert not embedded.is_running


def test_a_requested_port_is_used(tmp_path: Path) -> None:
    port = broker.free_port()
    with EmbeddedBroker(tmp_path, port=port) as embedded:
        assert embedded.url == f"redis://127.0.0.1:{port}/0"


def test_a_folder_belongs_to_one_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_LOCK_WAIT_S", 0.1)
    with EmbeddedBroker(tmp_path) as first:
        with pytest.raises(BrokerUnavailable, match="another broker runs"):
            EmbeddedBroker(tmp_path).start()
        assert first.is_running


def test_a_folder_becomes_free_when_its_broker_ends(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as first:
        timer = threading.Timer(0.2, first.stop)
        timer.start()
        with EmbeddedBroker(tmp_path) as second:
            assert second.is_running
        timer.join()


def test_a_server_that_ends_immediately_is_quoted(tmp_path: Path) -> None:
    server = write_program(tmp_path / "server", "echo the disk is on fire; exit 3")
    with pytest.raises(BrokerUnavailable, match="the disk is on fire"):
        EmbeddedBroker(tmp_path / "data", server=server).start()


def test_a_server_that_never_answers_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[subprocess.Popen[bytes]] = []

    def start(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        launched.append(start_child(*command, **options))
        return launched[-1]

    monkeypatch.setattr(broker, "start_child", start)
    server = write_program(tmp_path / "server", "exec sleep 60")
    embedded = EmbeddedBroker(tmp_path / "data", server=server, start_timeout_s=1.0)
    with pytest.raises(BrokerUnavailable, match="did not answer in 1 s"):
        embedded.start()
    assert launched
    assert all(is_gone(process.pid) for process in launched)


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    text = """
        import sys, time
        from pathlib import Path
        from tokenyard.process.embedded_broker import EmbeddedBroker
        embedded = EmbeddedBroker(Path(sys.argv[1]))
        embedded.start()
        print(embedded.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    assert not is_gone(pid)
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    eventually(lambda: is_gone(pid))
    with EmbeddedBroker(tmp_path) as next_one:  # its folder is free again
        assert next_one.is_running
