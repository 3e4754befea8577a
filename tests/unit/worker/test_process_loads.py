"""A worker process whose model cannot be loaded says so, and ends after a CUDA error."""

from __future__ import annotations

import multiprocessing
from unittest.mock import Mock

import pytest

from tokenyard.protocol.settings import WorkerSettings
from worker.engines import Backend, DeviceLost
from worker.messages import CommandRefused, LoadModel
from worker.models import ModelSpec
from worker.process.main import WorkerProcess

LOAD = LoadModel(ModelSpec(name="a", path="models/a"), None, "")


def test_a_model_that_cannot_be_loaded_is_refused() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = WorkerProcess(WorkerSettings(redis_url="redis://nowhere", model="any"), 0, theirs)

    continues = process._run_command(_failing(ValueError("no such file")), LOAD)

    assert continues
    assert ours.recv() == CommandRefused("a: ValueError: no such file")


def test_a_process_serves_no_other_model_after_a_cuda_error() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = WorkerProcess(WorkerSettings(redis_url="redis://nowhere", model="any"), 0, theirs)

    with pytest.raises(DeviceLost, match="illegal memory access"):
        process._run_command(_failing(DeviceLost("CUDA error: an illegal memory access")), LOAD)

    assert not ours.poll()


def _failing(fault: Exception) -> Backend:
    backend: Backend = Mock(load=Mock(side_effect=fault))
    return backend
