"""Temperature and power of a GPU, as its driver reports them by NVML."""

from __future__ import annotations

import logging
from typing import Any, Final

from tokenyard import clock
from worker.engines import SensorReading

log = logging.getLogger("tokenyard.worker.engines")

#: So long a reading is used again.
FRESH_S: Final = 10.0
#: Power varies with each step of the engine; a finer figure would only be sent more often.
_WATTS: Final = 5


class GpuSensors:
    """The sensors of one GPU. Reading them takes well under a millisecond and needs no CUDA."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """``nvml`` is the module pynvml, ``handle`` the GPU in its terms."""
        self._nvml = nvml
        self._handle = handle
        self._last = SensorReading()
        self._due = 0.0  # monotonic

    def read(self) -> SensorReading:
        """The last reading, or a new one if that is too old."""
        now = clock.monotonic()
        if now >= self._due:
            self._due = now + FRESH_S
            power_mw = self._asked("nvmlDeviceGetPowerUsage")
            power_w = None if power_mw is None else _WATTS * round(power_mw / 1000 / _WATTS)
            temperature_c = self._asked("nvmlDeviceGetTemperature", 0)  # 0: of the die
            self._last = SensorReading(temperature_c, power_w)
        return self._last

    def _asked(self, function: str, *arguments: int) -> int | None:
        """One figure; None where the driver has none, as for a MIG instance."""
        try:
            return int(getattr(self._nvml, function)(self._handle, *arguments))
        except self._nvml.NVMLError as error:
            log.debug("%s: %s", function, error)
            return None


def find_sensors(device: int) -> GpuSensors | None:
    """The sensors of a GPU as CUDA numbers it; None where NVML does not know it."""
    import torch

    try:
        from vllm.third_party import pynvml

        uuid = torch.cuda.get_device_properties(device).uuid
    except (ImportError, AttributeError):  # versions without them
        return None
    return open_sensors(pynvml, f"GPU-{uuid}")


def open_sensors(nvml: Any, uuid: str) -> GpuSensors | None:
    """The sensors of the GPU with this UUID; ``nvml`` is the module pynvml."""
    try:
        nvml.nvmlInit()
        return GpuSensors(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        log.debug("no sensors of %s: %s", uuid, error)
        return None
