"""A simulated yard shared by the tests of batch jobs, and files for it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Plant
from tests.support.servers import Server
from tokenyard.batch.files import member, read_lines

#: zstandard may be missing here, but not on a CI machine.
zstd = pytest.mark.skipif(
    importlib.util.find_spec("zstandard") is None and os.environ.get("CI") != "true",
    reason="zstandard is not installed, so nothing was tested with .zst files",
)
Lines = Sequence[dict[str, Any] | str]
WriteLines = Callable[[str, Lines], Path]


@pytest.fixture(scope="session")
def plant(no_leftover_processes: None, valkey_broker: Server) -> Iterator[Plant]:
    """A yard with a coordinator and a worker that answers immediately."""
    with Plant(valkey_broker.url) as plant:
        plant.coordinator()
        plant.worker()
        plant.wait_for_workers(1)
        yield plant


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """A function that writes a batch file, compressed according to its name."""

    def write(name: str, lines: Lines) -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_bytes(member(path, "".join(f"{text}\n" for text in texts).encode()))
        return path

    return write


def completion(number: int, **body: Any) -> dict[str, Any]:
    """A line in OpenAI's form."""
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"prompt {number}", "max_tokens": 4, **body},
    }


def objects(path: Path) -> list[dict[str, Any]]:
    """All lines of an output file."""
    return [json.loads(raw) for _, raw in read_lines(path) if raw is not None]
