"""The board on a loopback port: its own program."""

from __future__ import annotations

import contextlib

import httpx

from tests.support.processes import Plant
from tests.support.servers import free_port
from tests.support.waiting import eventually
from tokenyard.board.forms import ROOT


def serve(plant: Plant, **options: object) -> str:
    """Start the board of a yard, which ends with it; its URL without the path."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    program = plant._start("tokenyard.board", {"port": port, **options})

    def answers() -> bool:
        assert program.is_running, program.log[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}{ROOT}/static/board.css", timeout=20.0).is_success
        return False

    eventually(answers, timeout_s=60.0)
    return url
