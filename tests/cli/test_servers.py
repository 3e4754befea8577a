"""The server programs that `tokenyard up` can run as its broker, and the broker's port."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import redis

from tests.cli.running import write_program
from tests.support.brokers import required
from tests.support.servers import free_port
from tokenyard.process import embedded_broker as broker
from tokenyard.process import servers
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.process.servers import choose_server, describe, embedded_server
from tokenyard.protocol.errors import BrokerUnavailable, SettingsError


def program(folder: Path, name: str, says: str) -> Path:
    """A program that only prints its version."""
    return write_program(folder / name, f"echo '{says}'")


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only entry of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_the_default_is_the_embedded_server(on_path: Path) -> None:
    program(on_path, "valkey-server", "Valkey server v=8.0.1 malloc=jemalloc-5.3.0")
    assert choose_server("embedded") == embedded_server()


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"valkey-server": "Valkey server v=8.0.1", "redis-server": "Redis server v=7.4.0"}, 0),
        ({"valkey-server": "what?", "redis-server": "Redis server v=7.0.15 sha=0"}, 1),
        ({"redis-server": "Redis server v=10.2.0"}, 0),
        ({"redis-server": "Redis server v=6.2.14"}, None),
        ({}, None),
    ],
)
def test_auto_takes_the_first_server_that_is_new_enough(
    on_path: Path, there: dict[str, str], chosen: int | None
) -> None:
    """Given system servers, I expect the first that is new enough, else the embedded one."""
    found = [program(on_path, name, says) for name, says in there.items()]
    assert choose_server("auto") == (embedded_server() if chosen is None else found[chosen])


def test_a_program_may_be_named_by_path_or_name(on_path: Path) -> None:
    path = program(on_path, "my-server", "Redis server v=7.2.4")
    assert choose_server(str(path)) == choose_server("my-server") == path


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("Redis server v=6.2.14 sha=0", "Redis 6.2.14: Tokenyard needs Redis 7.0"),
        ("memcached 1.6", "neither a Valkey nor a Redis server"),
    ],
)
def test_an_unsuitable_program_is_refused(on_path: Path, says: str, why: str) -> None:
    path = program(on_path, "server", says)
    with pytest.raises(SettingsError, match=why):
        choose_server(str(path))


def test_a_missing_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no executable program"):
        choose_server(str(tmp_path / "nowhere"))


def test_a_missing_wheel_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BrokerUnavailable, match=r"PATH\[broker\].*--server auto"):
        embedded_server()


@pytest.mark.redis
def test_a_system_redis_can_be_the_broker(tmp_path: Path) -> None:
    system = required("redis")
    with EmbeddedBroker(tmp_path, server=system) as started:
        assert started.title == describe(system)[0]
        with redis.Redis.from_url(started.url) as connection:
            assert connection.config_get("appendonly") == {"appendonly": "yes"}


@pytest.mark.redis
def test_data_of_an_older_server_is_read_and_of_a_newer_one_refused(
    tmp_path: Path,
) -> None:
    system = required("redis")
    with EmbeddedBroker(tmp_path, server=system) as old, redis.Redis.from_url(old.url) as one:
        one.set("kept", "yes")
    with EmbeddedBroker(tmp_path) as new, redis.Redis.from_url(new.url) as one:
        assert one.get("kept") == b"yes"
        one.bgrewriteaof()
        embedded = new.title
        while one.info("persistence")["aof_rewrite_in_progress"]:
            pass
    with pytest.raises(BrokerUnavailable, match=f"written by {embedded}, which Redis .* cannot"):
        EmbeddedBroker(tmp_path, server=system).start()
    with EmbeddedBroker(tmp_path) as new, redis.Redis.from_url(new.url) as one:
        assert one.get("kept") == b"yes"


def test_a_damaged_file_is_not_blamed_on_a_version(tmp_path: Path) -> None:
    """Given a file that its own server cannot read, I expect the server's message."""
    with EmbeddedBroker(tmp_path):
        pass
    [base] = tmp_path.glob("appendonlydir/*.base.rdb")
    base.write_bytes(b"NONSENSE" + base.read_bytes()[8:])
    with pytest.raises(BrokerUnavailable) as failed:
        EmbeddedBroker(tmp_path).start()
    assert "Bad file format" in str(failed.value)
    assert "was written by" not in str(failed.value)


# The port


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port that plays 6379, which tests leave alone."""
    port = free_port()
    monkeypatch.setattr(broker, "USUAL_PORT", port)
    return port


def start(folder: Path, port: int | None = None) -> tuple[int, int]:
    """Start and stop a broker; its port, and the port that it lost."""
    with EmbeddedBroker(folder, port=port) as started:
        return int(started.url.rpartition(":")[2].partition("/")[0]), started.lost_port


def test_the_default_port_is_used_if_free(tmp_path: Path, usual: int) -> None:
    assert start(tmp_path) == (usual, 0)


def test_a_folder_keeps_its_port(tmp_path: Path, usual: int) -> None:
    """If 6379 is taken, I expect another port, and this one again once 6379 is free."""
    with socket.create_server(("127.0.0.1", usual)):
        port, lost = start(tmp_path)
        assert (port != usual, lost) == (True, 0)
        assert start(tmp_path) == (port, 0)
    assert start(tmp_path) == (port, 0)


def test_a_lost_port_is_reported_and_its_replacement_kept(tmp_path: Path, usual: int) -> None:
    assert start(tmp_path) == (usual, 0)
    with socket.create_server(("127.0.0.1", usual)):
        port, lost = start(tmp_path)
        assert (port != usual, lost) == (True, usual)
    assert start(tmp_path) == (port, 0)


def test_a_requested_port_is_not_kept(tmp_path: Path, usual: int) -> None:
    asked = free_port()
    assert start(tmp_path, asked) == (asked, 0)
    assert start(tmp_path, 0)[0] not in {asked, usual}
    assert start(tmp_path) == (usual, 0)
