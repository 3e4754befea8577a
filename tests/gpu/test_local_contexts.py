"""Each warm process has its own device context; the process that forks them has none."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu.conftest import Figures
from tests.gpu.device import MIB, Device, device_files, open_files
from tests.gpu.local import PROCESSES, Local
from tests.gpu.specs import bounded
from worker.host import fork_server as server

pytestmark = bounded(330)
BORN_S = 60.0


@pytest.fixture
def fork_server(local: Local) -> psutil.Process:
    """The parent of the pool's processes."""
    (found,) = {psutil.Process(pid).ppid() for pid in local.pids()}
    assert found != os.getpid()
    return psutil.Process(found)


def _tell_of_birth(pipe: Connection, device: str) -> None:
    """The findings of a newly forked process, and whether it can take the device."""
    import sys

    import torch

    found: dict[str, Any] = {
        "imported": sorted({"vllm", "transformers"} & set(sys.modules)),
        "initialized": torch.cuda.is_initialized(),
        "forked": torch.cuda._is_in_bad_fork(),
    }
    found["sum"] = float(torch.ones(8, device=device).sum())
    pipe.send(found)


def test_every_process_is_warm_and_reports_its_warm_up_time(local: Local, figures: Figures) -> None:
    assert len(set(local.pids())) == len(local.warm_up_s) == PROCESSES
    assert all(phases["first model"] > 0 for phases in local.warm_up_s), local.warm_up_s
    figures.note("warm_up_s", local.warm_up_s)


def test_the_first_model_ran_in_the_warm_up(local: Local, device: Device, figures: Figures) -> None:
    found = [one.baseline for one in local.controller.status()]

    assert all(one is not None for one in found)
    reserved = [one.device or 0 for one in found if one]
    figures.note("warm_reserved_mib", [round(one / MIB, 1) for one in reserved])
    assert not device.is_gpu or all(one > 0 for one in reserved)


def test_the_fork_server_has_imported_vllm_and_taken_no_device(
    fork_server: psutil.Process, device: Device
) -> None:
    # If one more process is forked
    ours, theirs = server.Pipe(duplex=False)
    process = server.ForkedProcess(target=_tell_of_birth, args=(theirs, device.name))
    process.start()
    assert psutil.Process(process.pid).ppid() == fork_server.pid
    theirs.close()
    assert ours.poll(BORN_S), "it says nothing"
    born = ours.recv()
    process.join(BORN_S)

    # I expect it to find no context, and to be able to create its own.
    assert born == {
        "imported": ["transformers", "vllm"],
        "initialized": False,
        "forked": False,
        "sum": 8.0,
    }
    assert process.exitcode == 0


def test_open_driver_files_of_a_process_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.touch()

    assert str(path) not in open_files(os.getpid())
    with path.open():
        assert str(path) in open_files(os.getpid())


def test_each_process_has_a_context_and_its_parents_have_none(
    local: Local, device: Device, fork_server: psutil.Process, figures: Figures
) -> None:
    """By NVML's list if it knows these processes; otherwise by their open driver files."""
    if not device.is_gpu:
        pytest.skip("a CPU has no contexts")
    workers, parents = set(local.pids()), {fork_server.pid, os.getpid()}
    files = {pid: device_files(pid) for pid in workers | parents}
    listed = device.computing()
    known = {
        "workers": sorted(workers),
        "fork_server": fork_server.pid,
        "tests": os.getpid(),
        "listed": sorted(listed),
        "device_files": {str(pid): found for pid, found in files.items()},
    }
    figures.note("contexts", known)

    if listed & (workers | parents):
        assert listed & (workers | parents) == workers
    # A process with a context has more driver files open than one that only queries its GPUs.
    fewest = min(sum(files[pid].values()) for pid in workers)
    assert fewest > max(sum(files[pid].values()) for pid in parents)
