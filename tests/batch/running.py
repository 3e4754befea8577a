"""`tokenyard batch` in separate processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.running import environment
from tests.support.processes import Plant


def words(plant: Plant, *arguments: object) -> list[str]:
    """What follows `tokenyard` in `tokenyard batch ...` on a yard."""
    yard = ["--redis-url", plant.url, "--yard", plant.keys.yard]
    return [*yard, "batch", *map(str, arguments)]


def command(plant: Plant, *arguments: object) -> list[str]:
    """The command line of `tokenyard batch ...` on a yard."""
    return [sys.executable, "-m", "tokenyard", *words(plant, *arguments)]


def batch(
    plant: Plant, *arguments: object, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(plant, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def start(plant: Plant, log: Path, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command; its output goes to a file."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command(plant, *arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **options,
        )
