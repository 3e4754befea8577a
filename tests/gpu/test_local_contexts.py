"""Warm processes have the device, each by itself; what they are forked from has not."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu.conftest import Figures
from tests.gpu.device import MIB, Device, has_open
from tests.gpu.local import PROCESSES, Local
from tests.gpu.specs import bounded
from worker.fork_server import Server

pytestmark = bounded(330)
BORN_S = 60.0


@pytest.fixture
def fork_server(local: Local) -> psutil.Process:
    """What the pool's processes are children of."""
    (found,) = {psutil.Process(pid).ppid() for pid in local.pids()}
    assert found != os.getpid()
    return psutil.Process(found)


def _tell_of_birth(pipe: Connection, device: str) -> None:
    """What a process finds that has just been forked, and whether it can take the device."""
    import sys

    import torch

    found: dict[str, Any] = {
        "imported": sorted({"vllm", "transformers"} & set(sys.modules)),
        "initialized": torch.cuda.is_initialized(),
        "forked": torch.cuda._is_in_bad_fork(),
    }
    found["sum"] = float(torch.ones(8, device=device).sum())
    pipe.send(found)


def test_every_process_is_warm_and_says_how_long_it_took(local: Local, figures: Figures) -> None:
    found = local.controller.status()

    assert [one.state for one in found] == ["warm"] * PROCESSES, local.told()
    assert len(set(local.pids())) == PROCESSES
    assert all(list(one.phases_s)[:2] == ["import", "device"] for one in found)
    figures.note("warm_up_s", [dict(one.phases_s) for one in found])


def test_its_first_model_ran_in_the_warm_up(local: Local, device: Device, figures: Figures) -> None:
    found = [one.baseline for one in local.controller.status()]

    assert all(one is not None for one in found)
    reserved = [one.device or 0 for one in found if one]
    figures.note("warm_reserved_mib", [round(one / MIB, 1) for one in reserved])
    assert not device.is_gpu or all(one > 0 for one in reserved)


def test_what_they_are_forked_from_has_imported_vllm_and_taken_no_device(
    fork_server: psutil.Process, device: Device
) -> None:
    # If one more process is forked
    ours, theirs = Server.Pipe(duplex=False)
    process = Server.Process(target=_tell_of_birth, args=(theirs, device.name))
    process.start()
    assert psutil.Process(process.pid).ppid() == fork_server.pid
    theirs.close()
    assert ours.poll(BORN_S), "it says nothing"
    born = ours.recv()
    process.join(BORN_S)

    # I expect it to find no context, and to be able to make its own.
    assert born == {
        "imported": ["transformers", "vllm"],
        "initialized": False,
        "forked": False,
        "sum": 8.0,
    }
    assert process.exitcode == 0


def test_the_finder_finds_who_has_a_file_open(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-uvm"
    path.touch()

    assert not has_open(os.getpid(), str(path))
    with path.open():
        assert has_open(os.getpid(), str(path))


def test_each_process_has_a_context_and_its_parents_have_none(
    local: Local, device: Device, fork_server: psutil.Process, figures: Figures
) -> None:
    if not device.is_gpu:
        pytest.skip("a CPU has no contexts")
    workers, parents = set(local.pids()), {fork_server.pid, os.getpid()}

    assert device.holders(workers) == workers
    assert device.holders(parents) == set()
    # NVML may see nothing, or other numbers, where the driver is outside of a container.
    listed = device.computing()
    assert not listed & parents
    figures.note("nvml_shows_pids", bool(listed & workers))
    assert listed & workers in (set(), workers)
