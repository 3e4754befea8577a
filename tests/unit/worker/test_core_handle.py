"""Where a core listens for its fronts."""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from unittest.mock import Mock

import pytest

from tokenyard.protocol.settings import WorkerSettings
from worker.host.core_handle import CoreHandle


def core(monkeypatch: pytest.MonkeyPatch) -> CoreHandle:
    """One whose process is never started."""
    monkeypatch.setattr("worker.host.core_handle.ForkedProcess", Mock())
    _, output = multiprocessing.Pipe(duplex=False)
    return CoreHandle(WorkerSettings(redis_url="redis://nowhere", model="any"), "w", 0, output)


@pytest.mark.parametrize("length", [1, 200])
def test_its_socket_has_a_name_that_a_socket_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    made = core(monkeypatch)
    Listener(made.address, "AF_UNIX").close()
    made.end()

    assert not Path(made.address).parent.exists()


def test_what_a_killed_host_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = core(monkeypatch)
    abandoned = tmp_path / f"{Path(first.address).parent.name}x"
    abandoned.mkdir()

    second = core(monkeypatch)
    assert not abandoned.exists()
    for made in (first, second):
        assert Path(made.address).parent.is_dir(), "its owner lives"
        made.end()
