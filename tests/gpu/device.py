"""The device under test, looked at from outside: who uses it, and how much of it is taken."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import psutil

MIB = 1024**2
GIB = 1024**3
Name = Literal["cuda", "cpu"]
#: CUDA opens it when it is initialized, and it stays open for as long as the process lives. Who
#: only asks the driver about its GPUs does not.
_CUDA_FILE = "/dev/nvidia-uvm"
_TIMEOUT_S = 30.0


class Device:
    """The first of the devices that the tests may use.

    On a CPU its memory is that of the processes that compute on it.
    """

    def __init__(self, name: Name) -> None:
        self.name = name
        self.is_gpu = name == "cuda"
        self.count = len(_gpus()) if self.is_gpu else 1
        if self.is_gpu and not self.count:
            raise LookupError("nvidia-smi and NVML show no GPU")

    @property
    def kv_cache_gib(self) -> float:
        """So much that a cache which stays behind is seen, and six of them fit."""
        return 4.0 if self.is_gpu else 0.25

    @property
    def once(self) -> int:
        """Bytes that first models may leave in a process for good: kernels, workspaces, caches."""
        return (1024 if self.is_gpu else 192) * MIB

    @property
    def slack(self) -> int:
        """Bytes that come and go with allocators and contexts; no model is as small."""
        return (256 if self.is_gpu else 96) * MIB

    def used(self, pids: Iterable[int]) -> int:
        """Bytes in use: on a GPU by anybody, on a CPU by these processes."""
        if self.is_gpu:
            return _gpus()[_first(len(_gpus()))][1]
        return sum(_resident(pid) for pid in pids)

    def holders(self, pids: Iterable[int]) -> set[int]:
        """Those of these processes in which CUDA is initialized."""
        return {pid for pid in pids if has_open(pid, _CUDA_FILE)}

    def computing(self) -> set[int]:
        """The processes that compute on any GPU, as NVML tells; it may call them otherwise."""
        nvml = _nvml()
        if nvml is None:
            return set()
        handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
        running = [nvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
        return {process.pid for processes in running for process in processes}


def has_open(pid: int, path: str) -> bool:
    """Whether a process has this file open."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return any(_target(link) == path for link in links)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _first(count: int) -> int:
    """The number that NVML gives the GPU which CUDA calls 0."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return int(named) if named.isdecimal() and int(named) < count else 0


def _nvml() -> Any:
    """NVML's Python API, initialized; None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    return pynvml


def _gpus() -> list[tuple[str, int]]:
    """The GPUs of this host: name, and bytes in use."""
    nvml = _nvml()
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
    """What the device is called."""
    return _gpus()[0][0] if device.is_gpu else "CPU"
