"""Checks for the instruction sets that vLLM's CPU build needs, and the permission to use AMX.

Without these checks a process on an unsuitable CPU dies by SIGILL without a message.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from worker.engines import DeviceUnusable

_CPUINFO: Final = Path("/proc/cpuinfo")
#: Names of the feature list in ``/proc/cpuinfo``, on x86 and on ARM.
_LISTS: Final = frozenset({"flags", "Features"})
#: By machine: features that all CPU kernels of vLLM use (vLLM's cmake/cpu_extension.cmake).
_NEEDED: Final[Mapping[str, Sequence[str]]] = {
    "x86_64": ("avx2", "fma", "f16c"),
    "aarch64": ("asimd", "asimddp", "asimdhp"),
}
#: vLLM has three libraries for x86 and checks only one feature of each. So a CPU with that
#: feature (the key) needs the others too.
_TOGETHER: Final[Mapping[str, Sequence[str]]] = {
    "avx512f": ("avx512bw", "avx512dq", "avx512vl"),
    "avx512_bf16": ("avx512_vnni",),
}


def features_of(cpuinfo: str) -> frozenset[str]:
    """The features, by Linux's names, that all CPUs in the text of a ``/proc/cpuinfo`` share."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    found = [frozenset(values.split()) for name, _, values in lines if name.strip() in _LISTS]
    return frozenset.intersection(*found) if found else frozenset()


def missing_features(machine: str, features: frozenset[str]) -> list[str]:
    """The features that vLLM's CPU build needs and a CPU lacks.

    ``machine`` is the result of `platform.machine`. Empty for machines other than x86_64 and
    aarch64, and if ``features`` is empty.
    """
    if not features or machine not in _NEEDED:
        return []
    needed = [*_NEEDED[machine]]
    for first, others in _TOGETHER.items():
        needed += others if first in features else ()
    return [feature for feature in needed if feature not in features]


def features_here() -> frozenset[str]:
    """The features of this host's CPUs; empty without ``/proc/cpuinfo``."""
    try:
        return features_of(_CPUINFO.read_text())
    except OSError:
        return frozenset()


def missing_here() -> list[str]:
    """The features that vLLM's CPU build needs and this host lacks."""
    return missing_features(platform.machine(), features_here())


def check_cpu() -> None:
    """Raise `DeviceUnusable` if vLLM's CPU build cannot run; call before importing vLLM."""
    missing = missing_here()
    if missing:
        raise DeviceUnusable(
            f"this CPU does not have {', '.join(missing)}, which vLLM's CPU build needs: use"
            " another host (x86: Intel since Haswell, AMD since Zen; ARM: v8.2 or later), or give a"
            " virtual machine the CPU model of its host"
        )


def request_amx() -> None:
    """Ask the kernel for permission to use AMX, which vLLM uses if the CPU has it.

    Linux lets a process use AMX's tile registers only after arch_prctl(ARCH_REQ_XCOMP_PERM)
    (https://docs.kernel.org/arch/x86/xstate.html), otherwise the first tile instruction raises
    SIGILL. A fork inherits the permission and an exec loses it, so each process asks for itself.
    Does nothing on a CPU without AMX.

    Raises `DeviceUnusable` if the kernel refuses.
    """
    import torch

    has_amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # as vLLM does
    if has_amx and not torch.cpu._init_amx():  # noqa: SLF001  # has no public name
        raise DeviceUnusable(
            "this CPU has AMX, but the kernel does not let this process use it: use Linux 5.16 or"
            " newer, and allow the system call arch_prctl where a sandbox forbids it"
        )
