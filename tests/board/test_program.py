"""`tokenyard board`: how it starts, refuses to start, and ends."""

from __future__ import annotations

import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.running import Command
from tests.support.builders import random_name
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.process.program import Exit
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.http_settings import BoardSettings

Start = Callable[..., Command]


@pytest.fixture
def start(broker: Server, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def run(*options: str, url: str = "") -> Command:
            words = ("--redis-url", url or broker.url, "board", *options)
            return stack.enter_context(Command(tmp_path / random_name("log"), *words))

        yield run


def url_of(board: Command) -> str:
    return eventually(lambda: re.search(r"the board is at (\S+)", board.said))[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_also_with_pages_open(start: Start, number: int) -> None:
    running = start("--port", "0")
    asked = urllib.request.Request(f"{url_of(running)}/", headers={"accept": "text/event-stream"})
    with urllib.request.urlopen(asked, timeout=30) as stream:
        assert stream.readline().startswith(b"event: live_")
        running.process.send_signal(number)
        assert running.process.wait(15) == Exit.OK
        stream.read()
    assert "Traceback" not in running.said


def test_without_a_broker_it_serves_what_it_can(start: Start) -> None:
    running = start("--port", "0", url="redis://127.0.0.1:1")
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(f"{url_of(running)}/audit", timeout=30)
    refused.value.close()
    with urllib.request.urlopen(f"{url_of(running)}/static/board.js", timeout=30) as answer:
        assert answer.status == 200


def test_a_port_that_is_taken_is_told(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        running = start("--port", str(taken.getsockname()[1]))
        assert running.process.wait(30) == Exit.USAGE
    assert running.said.startswith("Error: port: cannot listen on 127.0.0.1:")


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ({"host": "0.0.0.0", "keys": "off"}, "keys"),
        ({"hosts": ("board.example.com",)}, "hosts"),
        ({"keys": "required", "hosts": ("board.example.com/",)}, "hosts"),
        ({"keys": "required", "hosts": ("",)}, "hosts"),
        ({"port": -1}, "port"),
        ({"max_reads": 0}, "max_reads"),
        ({"wait_s": 0}, "wait_s"),
        ({"session_s": -1}, "session_s"),
        ({"grace_s": -1}, "grace_s"),
        ({"send_s": 0}, "send_s"),
        ({"tls_cert": Path("/nowhere")}, "tls_cert"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], label: str) -> None:
    with pytest.raises(SettingsError, match=f"^{label}"):
        BoardSettings(redis_url="redis://unused", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "keys", "needs"),
    [
        *(("127.0.0.1", "auto", False), ("::1", "auto", False), ("localhost", "auto", False)),
        *(("0.0.0.0", "auto", True), ("10.0.0.1", "auto", True), ("::", "auto", True)),
        *(("127.0.0.1", "required", True), ("127.0.0.1", "off", False)),
    ],
)
def test_when_it_asks_for_keys(host: str, keys: str, needs: bool) -> None:
    settings = BoardSettings(redis_url="redis://unused", host=host, keys=keys)  # type: ignore[arg-type]
    assert settings.needs_keys is needs
