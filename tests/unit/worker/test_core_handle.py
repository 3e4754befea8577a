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


@pytest.mark.parametrize("length", [1, 200])
def test_its_socket_has_a_name_that_a_socket_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("worker.host.core_handle.ForkedProcess", Mock())
    _, output = multiprocessing.Pipe(duplex=False)

    core = CoreHandle(WorkerSettings(redis_url="redis://nowhere", model="any"), "w", 0, output)
    Listener(core.address, "AF_UNIX").close()
    core.end()

    assert not Path(core.address).parent.exists()
