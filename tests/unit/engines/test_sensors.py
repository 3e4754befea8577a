"""Temperature and power of a GPU: a played NVML, and who reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import Pipe
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fake_clock import FakeClock
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import SensorReading
from worker.engines.device import FRESH_S, find_sensors, open_sensors
from worker.engines.simulated.backend import SimulatedBackend
from worker.engines.vllm.backend import CoreBackend
from worker.process.main import WorkerProcess


class NvmlError(Exception):
    """What NVML raises."""


class PlayedNvml:
    """A driver with one GPU."""

    NVMLError = NvmlError

    def __init__(self, *, temperature: int = 61, power_mw: int = 303_200) -> None:
        self.temperature, self.power_mw = temperature, power_mw
        self.has_driver, self.has_power, self.reads = True, True, 0

    def nvmlInit(self) -> None:  # noqa: N802  # the name of the real one
        if not self.has_driver:
            raise NvmlError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise NvmlError("Not Found")
        return "handle"

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        assert (handle, sensor) == ("handle", 0)
        self.reads += 1
        return self.temperature

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        assert handle == "handle"
        if not self.has_power:
            raise NvmlError("Not Supported")
        return self.power_mw


@pytest.fixture
def clock(fake_clock: FakeClock) -> Callable[[float], None]:
    """A function that lets time pass."""
    return fake_clock.advance


def test_a_reading_is_used_for_some_seconds(clock: Callable[[float], None]) -> None:
    nvml = PlayedNvml()
    sensors = open_sensors(nvml, "GPU-1")
    assert sensors
    assert sensors.read() == SensorReading(61, 305)  # power in steps
    nvml.temperature = 70
    clock(FRESH_S - 1)
    assert (sensors.read().temperature_c, nvml.reads) == (61, 1)
    clock(2)
    assert (sensors.read().temperature_c, nvml.reads) == (70, 2)


def test_what_the_driver_does_not_say_is_unknown() -> None:
    nvml = PlayedNvml()
    nvml.has_power = False
    sensors = open_sensors(nvml, "GPU-1")
    assert sensors
    assert sensors.read() == SensorReading(61, None)


def test_no_driver_and_unknown_gpus_have_no_sensors() -> None:
    nvml = PlayedNvml()
    assert open_sensors(nvml, "MIG-2") is None
    nvml.has_driver = False
    assert open_sensors(nvml, "GPU-1") is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedNvml:
    """A played GPU 3, and the driver that knows it."""
    nvml = PlayedNvml()
    module: Any = ModuleType("pynvml")
    for name in dir(nvml):
        if name.startswith(("nvml", "NVML")):
            setattr(module, name, getattr(nvml, name))
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", module)
    monkeypatch.setattr("vllm.third_party.pynvml", module, raising=False)
    properties = {3: SimpleNamespace(uuid="1")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    return nvml


def test_a_gpu_is_found_by_its_uuid(gpu: PlayedNvml) -> None:
    sensors = find_sensors(3)
    assert sensors
    assert sensors.read() == SensorReading(61, 305)


def test_a_torch_without_uuids_has_no_sensors(
    gpu: PlayedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert find_sensors(3) is None


def test_a_gpu_is_read_once_it_is_taken(gpu: PlayedNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CoreBackend(device=3)
    assert backend.read_sensors() == SensorReading()
    for name in ("_is_in_bad_fork", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(torch, "matmul", lambda *_: None)
    backend._take_device()
    assert backend.read_sensors() == SensorReading(61, 305)


def test_a_cpu_has_no_sensors() -> None:
    assert CoreBackend(cores=[0]).read_sensors() == SensorReading()
    assert SimulatedBackend().read_sensors() == SensorReading()


def test_heartbeats_carry_what_the_sensors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(redis_url="redis://nowhere", model="any", engine="simulated")
    process = WorkerProcess(settings, 0, Pipe()[0])
    assert process._heartbeat(None).tally.temperature_c is None  # before there is a backend
    process._backend = backend = SimulatedBackend()
    assert process._heartbeat(None).tally.temperature_c is None
    monkeypatch.setattr(
        SimulatedBackend, "read_sensors", lambda _: SensorReading(temperature_c=61, power_w=305)
    )
    tally = process._heartbeat(None).tally
    assert (tally.temperature_c, tally.power_w, backend) == (61, 305, process._backend)
