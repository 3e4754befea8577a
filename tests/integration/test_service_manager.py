"""Programs under a service manager: what it hears of them."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.support.processes import Plant
from tests.support.servers import Server

WAIT_S = 60.0


@pytest.mark.long
@pytest.mark.parametrize("program", ["coordinator", "worker"])
def test_it_hears_that_a_program_is_up_gets_on_and_ends(
    program: str, valkey_broker: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear, Plant(valkey_broker.url) as plant:
        ear.bind(str(tmp_path / "notify"))
        ear.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(ear.getsockname()))
        monkeypatch.setenv("WATCHDOG_USEC", "400000")

        # If a program is started by one
        started = plant.coordinator() if program == "coordinator" else plant.worker()

        # I expect it to be told that it is up, and that it gets on
        assert ear.recv(100) == b"READY=1"
        for _ in range(3):
            assert ear.recv(100) == b"WATCHDOG=1"

        # and that it ends.
        started.signal(signal.SIGTERM)
        heard = ear.recv(100)
        while heard == b"WATCHDOG=1":
            heard = ear.recv(100)
        assert heard == b"STOPPING=1"
        assert started.wait() == 0
