"""The board's own program on a loopback port."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import Server
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def served(
    shared_server: object, tmp_path_factory: pytest.TempPathFactory, no_leftover_processes: None
) -> Iterator[str]:
    """Host and port of a board without keys."""
    server: Server = shared_server("valkey")  # type: ignore[operator]
    log: Path = tmp_path_factory.mktemp("board") / "log"
    command = [sys.executable, "-m", "tokenyard", "--redis-url", server.url, "board", "--port", "0"]
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        found = eventually(
            lambda: re.search(r"the board is at http://(\S+)/board", log.read_text())
        )
        yield found[1]
        process.terminate()
        assert process.wait(20) == 0
