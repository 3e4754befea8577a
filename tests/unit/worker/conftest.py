"""Pools with played processes, and a clock that the test sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pools import Theatre, theatre
from tests.unit.worker.commander import Commander
from tests.unit.worker.models_file import Write


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
