"""`tokenyard batch` in separate processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis import Redis

from tests.cli.running import environment, tokenyard
from tests.support.processes import ROOT, Plant
from tests.support.waiting import eventually


def words(plant: Plant, *arguments: object) -> list[str]:
    """What follows `tokenyard` in `tokenyard batch ...` on a yard."""
    yard = ["--redis-url", plant.url, "--yard", plant.keys.yard]
    return [*yard, "batch", *map(str, arguments)]


def command(plant: Plant, *arguments: object, program: Sequence[str] = ()) -> list[str]:
    """The command line of `tokenyard batch ...` on a yard.

    A ``program`` of the tests, a module and its own words, may stand in for `tokenyard`.
    """
    return [sys.executable, "-m", *(program or ("tokenyard",)), *words(plant, *arguments)]


def batch(
    plant: Plant, *arguments: object, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return tokenyard(*words(plant, *arguments), timeout_s=timeout_s)


def start(
    plant: Plant, log: Path, *arguments: object, program: Sequence[str] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command; its output goes to a file."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command(plant, *arguments, program=program),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **options,
        )


def wait_for_waiting_workers(connection: Redis, count: int) -> None:
    """Wait until the broker knows so many workers that wait for a job."""

    def look() -> bool:
        clients = connection.client_list()
        return sum(one["cmd"] == "blmove" and "b" in one["flags"] for one in clients) == count

    eventually(look)
