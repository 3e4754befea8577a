"""How commands and clients find the yard of `tokenyard up`, and the messages of a second `up`."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.cli.running import Ask, StartUp, python
from tests.docs.pages import page, section
from tests.support.servers import Server
from tokenyard import AsyncClient, Client
from tokenyard.process.program import Exit
from tokenyard.process.running import running_up
from tokenyard.protocol.keys import Keys

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def home(invoke: Ask, tmp_path: Path) -> dict[str, str]:
    """An environment whose records only this test's programs read."""
    return {"XDG_DATA_HOME": str(tmp_path / "xdg")}


@pytest.mark.long
def test_commands_and_clients_find_an_up_with_its_own_folder(
    start_up: StartUp, invoke: Ask, home: dict[str, str]
) -> None:
    up = start_up("--workers", "1", env=home)
    url = up.wait_ready()["url"]
    assert json.loads(invoke("info", "--json").stdout)["yard"] == "main"
    elsewhere = invoke("--yard", "other", "info")
    assert elsewhere.exit_code == Exit.UNAVAILABLE
    assert "give `--yard main`, which runs here" in elsewhere.stderr
    assert invoke("submit", "hello", "--max-tokens", "2").exit_code == Exit.OK
    with Client() as client:
        assert client.submit("hello", max_tokens=2).result(timeout=30).tokens
        assert client._core.state.url == url
    up.signal(signal.SIGTERM)
    assert up.wait() == Exit.OK
    assert invoke("info").exit_code == Exit.UNAVAILABLE


async def _ask() -> object:
    async with AsyncClient() as client:
        return (await (await client.submit("hello", max_tokens=2)).result(timeout=30)).tokens


@pytest.mark.long
def test_clients_find_an_up_with_a_foreign_broker(
    start_up: StartUp, home: dict[str, str], valkey_broker: Server, keys: Keys
) -> None:
    group = ("--redis-url", valkey_broker.url, "--yard", keys.yard)
    up = start_up("--workers", "1", group=group, env=home)
    up.wait_ready()
    with Client(yard=keys.yard) as client:
        assert client.submit("hello", max_tokens=2).result(timeout=30).tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENYARD_YARD", keys.yard)
        assert asyncio.run(_ask())


@pytest.mark.long
def test_a_second_up_on_the_same_folder_names_the_first(
    start_up: StartUp, home: dict[str, str]
) -> None:
    first = start_up("--workers", "1", env=home)
    url = first.wait_ready()["url"]
    second = start_up(env=home, data_dir=first.data_dir)
    assert second.wait() == Exit.FAILED
    assert second.said.count("\n") == 1
    assert f"pid {first.process.pid} at {url} uses {first.data_dir} already" in second.said
    assert running_up(first.data_dir)


@pytest.mark.long
def test_a_second_up_on_another_folder_names_the_one_that_commands_find(
    start_up: StartUp, home: dict[str, str]
) -> None:
    first = start_up("--workers", "1", env=home)
    url = first.wait_ready()["url"]
    second = start_up("--workers", "1", env=home)
    second.wait_ready()
    assert f"pid {first.process.pid} at {url} is what commands without a URL find" in second.said
    with Client() as client:
        assert client._core.state.url == url


@pytest.mark.long
def test_up_warns_of_a_lost_port(start_up: StartUp, home: dict[str, str], tmp_path: Path) -> None:
    """Given a folder whose port another program has taken, I expect a warning."""
    with socket.create_server(("127.0.0.1", 0)) as thief:
        data = tmp_path / "data"
        data.mkdir()
        (data / "port").write_text(str(thief.getsockname()[1]))
        up = start_up("--workers", "1", port=False, data_dir=data, env=home)
        up.wait_ready()
        assert f"the previous port {thief.getsockname()[1]} is taken" in up.said


@pytest.mark.long
@pytest.mark.redis
def test_up_runs_the_requested_server_and_names_it(start_up: StartUp, home: dict[str, str]) -> None:
    up = start_up("--workers", "1", "--server", "redis-server", env=home)
    ready: dict[str, Any] = up.wait_ready()
    with redis.Redis.from_url(ready["url"]) as connection:
        version = connection.info("server")["redis_version"]
    assert ready["server"] == f"Redis {version}"
    assert f"The broker is Redis {version} at {ready['url']}." in up.said


def test_up_runs_the_embedded_server_by_default(yard: dict[str, Any]) -> None:
    assert yard["server"].startswith("Valkey ")


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (["--server", "/nowhere/redis-server"], Exit.USAGE, "no executable program there"),
        (["--server", sys.executable], Exit.USAGE, "neither a Valkey nor a Redis"),
    ],
)
def test_an_unsuitable_server_is_one_line(
    start_up: StartUp, options: list[str], status: Exit, why: str
) -> None:
    up = start_up(*options)
    assert up.wait() == status
    [*_, last] = up.said.splitlines()
    assert last.startswith("Error: ")
    assert why in last
    assert "Traceback" not in up.said


@pytest.mark.long
def test_the_python_of_the_readme_runs_as_printed(
    start_up: StartUp, home: dict[str, str], tmp_path: Path
) -> None:
    """Given a running `up`, I expect the README's block to run unchanged."""
    [block] = PYTHON.findall(section(page("README.md"), "### From Python"))
    up = start_up("--workers", "1", port=False, env=home)
    up.wait_ready()
    done = python("-c", block, cwd=tmp_path, env=home)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2 + 90  # one whole, one streamed, and those of `map`
