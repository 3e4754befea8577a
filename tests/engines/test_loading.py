"""The environment that all processes of a host share, and the backend of each process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tokenyard.protocol.settings import WorkerSettings
from worker.engines.loading import make_backend, make_core_backend, prepare_host
from worker.engines.simulated.backend import SimulatedBackend


def settings(**fields: Any) -> WorkerSettings:
    """Settings of a host that serves a model."""
    return WorkerSettings(redis_url="redis://nowhere", model="any", **fields)


@pytest.fixture(autouse=True)
def environment() -> Iterator[dict[str, str]]:
    """An untouched environment, restored after the test."""
    with mock.patch.dict(os.environ, clear=True):
        yield os.environ


def test_every_process_sees_all_devices_of_its_host(environment: dict[str, str]) -> None:
    prepare_host(settings(slots=2, device="cuda", devices=("2", "5")))

    assert environment["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "OMP_NUM_THREADS" not in environment


@pytest.mark.parametrize("device", [0, 1])
def test_a_backend_knows_its_own_device(device: int) -> None:
    backend = make_core_backend(settings(slots=2, device="cuda", devices=("2", "5")), device)

    # vLLM counts the visible devices.
    assert (backend._device, backend._cores) == (device, ())


def test_without_a_gpu_a_device_is_a_share_of_the_cores(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    environment["OMP_NUM_THREADS"] = "1"

    given = settings(slots=2, device="cpu")
    prepare_host(given)
    backends = [make_core_backend(given, device) for device in (0, 1)]

    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert [backend._cores for backend in backends] == [[0, 1], [2, 3]]
    assert [backend._threads for backend in backends] == [1, 1]


def test_the_simulated_engine_needs_no_environment(environment: dict[str, str]) -> None:
    given = settings(engine="simulated", crash_point="loading:2")

    before = dict(environment)
    prepare_host(given)

    assert isinstance(make_backend(given, ""), SimulatedBackend)
    assert environment == before
