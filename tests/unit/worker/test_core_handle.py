"""Where a core listens for its fronts."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from unittest.mock import Mock

import pytest

from tokenyard.process.home import _MOST_BYTES
from tokenyard.protocol.settings import WorkerSettings
from worker.host.allocation import Goal
from worker.host.fork_server import CoreHandle
from worker.host.pool import PoolGroups


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short name, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def core(monkeypatch: pytest.MonkeyPatch) -> CoreHandle:
    """One whose process is never started."""
    monkeypatch.setattr("worker.host.fork_server.ForkedProcess", Mock())
    _, output = multiprocessing.Pipe(duplex=False)
    return CoreHandle(WorkerSettings(redis_url="redis://nowhere", model="any"), "w", 0, output)


@pytest.mark.parametrize("length", [1, _MOST_BYTES, _MOST_BYTES + 1, 200])
def test_its_socket_has_a_name_that_a_socket_may_have(
    root: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    # Given a folder for temporary files whose whole name is so long, but for the first
    folder = root / ("x" * max(1, length - len(str(root)) - 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if length > 1:
        assert len(str(folder)) == length

    made = core(monkeypatch)
    Listener(made.address, "AF_UNIX").close()
    made.end()

    assert not Path(made.address).parent.exists()
    # So has that of a group.
    groups = PoolGroups([])
    groups.start()
    leader = Mock()
    groups._numbers = itertools.count(9999)
    groups.form([leader], Goal(Mock(), (0,)), "")
    address = leader.load.call_args.args[1].address
    Listener(address, "AF_UNIX").close()
    groups.stop()
    assert not Path(address).parent.exists()


def test_what_a_killed_host_has_left_is_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    first = core(monkeypatch)
    abandoned = root / f"{Path(first.address).parent.name}x"
    abandoned.mkdir()

    second = core(monkeypatch)
    assert not abandoned.exists()
    for made in (first, second):
        assert Path(made.address).parent.is_dir(), "its owner lives"
        made.end()
