"""Pools with played processes, and a clock that the test sets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import worker.host.process_handle
import worker.process.loop
from tests.support.pools import Theatre, theatre
from tests.unit.worker.commander import Commander
from tests.unit.worker.models_file import Write


class Clock:
    """The time of a process handle."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000.0 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker.host.process_handle, "time", clock)
    return clock


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets the wall clock of the engine loop ahead by seconds."""
    ahead: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + sum(ahead))
    monkeypatch.setattr(worker.process.loop, "time", clock)
    return ahead.append


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Theatre]:
    """One device with a spare."""
    with theatre(monkeypatch, spares=1, drain_timeout_s=60.0) as played:
        played.warm_up()
        yield played


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Theatre]:
    """Two devices."""
    with theatre(monkeypatch, slots=2) as played:
        played.warm_up()
        yield played


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a models file beside a folder `m`, and an adapter of rank 8 in `a`."""

    def write(text: str) -> Path:
        file = tmp_path / "models.toml"
        file.write_text(text, encoding="utf-8")
        return file

    (tmp_path / "m").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text(json.dumps({"r": 8, "peft_type": "LORA"}))
    return write


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Commander]:
    """A host with two devices, and a spare for the first."""
    with theatre(monkeypatch, slots=2, spares=1) as played:
        yield Commander(played)
