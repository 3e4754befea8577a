"""The device under test from outside: its users and its memory."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil

MIB = 1024**2
GIB = 1024**3
Name = Literal["cuda", "cpu"]
_DRIVER = "/dev/nvidia"
_TIMEOUT_S = 30.0


class Device:
    """The first device that the tests may use.

    On a CPU, its memory is that of the processes that compute on it.
    """

    def __init__(self, name: Name) -> None:
        self.name = name
        self.is_gpu = name == "cuda"
        self.count = len(_gpus()) if self.is_gpu else 1
        if self.is_gpu and not self.count:
            raise LookupError("nvidia-smi and NVML show no GPU")

    @property
    def patience(self) -> float:
        """How many times longer than on a GPU a wait may take."""
        return 1.0 if self.is_gpu else 3.0

    @property
    def kv_cache_gib(self) -> float:
        """A size that shows if a cache stays behind, and of which six fit."""
        return 4.0 if self.is_gpu else 0.25

    @property
    def once(self) -> int:
        """Bytes that first models may leave in a process for good: kernels, workspaces, caches."""
        return (1024 if self.is_gpu else 192) * MIB

    @property
    def slack(self) -> int:
        """Bytes that come and go with allocators and contexts; every model is larger."""
        return (256 if self.is_gpu else 96) * MIB

    def used(self, pids: Iterable[int]) -> int:
        """Bytes in use: on a GPU by all processes, on a CPU by these."""
        if self.is_gpu:
            return _gpus()[_first(len(_gpus()))][1]
        return sum(_resident(pid) for pid in pids)

    def computing(self) -> set[int]:
        """The process ids that compute on any GPU, by NVML.

        In a container NVML may report other ids, or none.
        """
        with _nvml() as nvml:
            if nvml is None:
                return set()
            count = nvml.nvmlDeviceGetCount()
            handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(count)]
            running = [nvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
            return {process.pid for processes in running for process in processes}


def device_files(pid: int) -> dict[str, int]:
    """How often a process has each file of NVIDIA's driver open."""
    return dict(Counter(path for path in open_files(pid) if path.startswith(_DRIVER)))


def open_files(pid: int) -> list[str]:
    """The paths of a process's open files."""
    return [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed in between
        return ""


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _first(count: int) -> int:
    """NVML's index of the GPU that CUDA calls 0."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return int(named) if named.isdecimal() and int(named) < count else 0


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML's Python API; None if it is not installed. No file of the driver stays open."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> list[tuple[str, int]]:
    """The GPUs of this host: name, and bytes in use."""
    with _nvml() as nvml:
        if nvml is None:
            return list(_asked_of_nvidia_smi())
        found = []
        for at in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(at)
            name = nvml.nvmlDeviceGetName(handle)
            text = name.decode() if isinstance(name, bytes) else name
            found.append((text, int(nvml.nvmlDeviceGetMemoryInfo(handle).used)))
        return found


def _asked_of_nvidia_smi() -> Iterable[tuple[str, int]]:
    asked = ["nvidia-smi", "--query-gpu=name,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    for line in done.stdout.splitlines():
        name, _, used_mib = line.rpartition(",")
        yield name.strip(), int(used_mib) * MIB


def name_of(device: Device) -> str:
    """The name of the device."""
    return _gpus()[0][0] if device.is_gpu else "CPU"
