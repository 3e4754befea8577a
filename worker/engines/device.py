"""The device of an engine: its sensors, its errors and its lock."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

from tokenyard import clock
from tokenyard.process.running import lock_within
from worker.engines import DeviceLost, SensorReading

log = logging.getLogger("tokenyard.worker.engines")

# Temperature and power of a GPU, as its driver reports them by NVML.

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


# Classifies errors of a device: whether the process must end, or may try again.
#
# After most CUDA errors (CUDA calls them sticky) every later call in the process fails too. Running
# out of memory is no such error.

#: Errors of CUDA, and of the libraries and allocators that use it.
_LOST: Final = re.compile(
    r"CUDA error|CUDA driver error|CUDA kernel errors|cudaError|CUDNN_STATUS|CUBLAS_STATUS"
    r"|NCCL error|CUDA Error: |CUDACachingAllocator|CuMem allocator|Triton Error \[CUDA\]"
)
_MEMORY: Final = re.compile(
    r"out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)
#: vLLM measured the free memory while another process allocated or freed some.
_DISTURBED: Final = re.compile(
    r"Error in memory profiling|less than desired GPU memory utilization"
)


def is_device_lost(error: BaseException) -> bool:
    """Whether the process must end because it can no longer use the GPU."""
    return any(isinstance(one, DeviceLost) or _is_lost(one) for one in causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU ran out of memory."""
    return any(_MEMORY.search(str(one)) for one in causes(error))


def was_disturbed(error: BaseException) -> bool:
    """Whether another process interfered, so that a retry can succeed."""
    return any(_DISTURBED.search(str(one)) for one in causes(error))


def _is_lost(error: BaseException) -> bool:
    # By name: only torch 2.9 and later has it. Its subclasses and plain errors match by text.
    is_cuda = type(error).__name__ == "AcceleratorError" or _LOST.search(str(error)) is not None
    is_runtime = isinstance(error, (RuntimeError, AssertionError))
    return is_cuda and is_runtime and _MEMORY.search(str(error)) is None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# A lock between the processes of a GPU: only one at a time loads a model or falls asleep. vLLM
# measures the free memory of the whole GPU before and after these two, and fails if another process
# changes it in between. Processes may warm up, wake or unload a model at the same time.


class DeviceLock:
    """The lock of one GPU, on a file: the kernel releases it when the process dies.

    Without a file, as on a CPU, it never waits. A nested acquisition does nothing.
    """

    def __init__(self, path: Path | None = None, patience_s: float = 600.0) -> None:
        """After ``patience_s`` seconds it logs a warning and continues without the lock."""
        self._path = path
        self._patience_s = patience_s
        self._is_inside = False

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the lock alone."""
        return self._taken(fcntl.LOCK_EX)

    def shared(self) -> AbstractContextManager[None]:
        """Hold the lock together with other shared holders."""
        return self._taken(fcntl.LOCK_SH)

    @contextmanager
    def _taken(self, kind: int) -> Iterator[None]:
        if self._is_inside or self._path is None:
            yield
            return
        file = _open(self._path)
        self._is_inside = True
        try:
            if file is not None and not lock_within(file, self._patience_s, kind):
                log.warning(
                    "another process has been changing this GPU for %g s (start_timeout_s):"
                    " going on beside it",
                    self._patience_s,
                )
            yield
        finally:
            self._is_inside = False
            if file is not None:
                os.close(file)


def lock_of_gpu(gpu: int, patience_s: float) -> DeviceLock:
    """The lock of a GPU, by its number among those visible to this process.

    ``patience_s`` is the longest wait in seconds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[gpu].strip() if gpu < len(visible) and visible[gpu].strip() else str(gpu)
    folder = Path(tempfile.gettempdir()) / f"tokenyard-{os.getuid()}"
    return DeviceLock(folder / f"gpu-{name.replace('/', '-')}.lock", patience_s)


def _open(path: Path) -> int | None:
    """Open or create the file; None, without a lock, if that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.warning("loads on this GPU may disturb each other: %s", error)
        return None
