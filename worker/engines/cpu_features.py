"""The instruction sets of this CPU: which ones vLLM's CPU build needs, and AMX.

Without these checks, a process on an unsuitable CPU dies by SIGILL and cannot say why.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from worker.engines import DeviceUnusable

_CPUINFO: Final = Path("/proc/cpuinfo")
#: How Linux names the list in ``/proc/cpuinfo``: on x86 and on ARM.
_LISTS: Final = frozenset({"flags", "Features"})
#: By machine: what all of vLLM's CPU kernels are compiled for (vLLM's cmake/cpu_extension.cmake).
_NEEDED: Final[Mapping[str, Sequence[str]]] = {
    "x86_64": ("avx2", "fma", "f16c"),
    "aarch64": ("asimd", "asimddp", "asimdhp"),
}
#: vLLM has three libraries for x86 and takes the largest one whose name-giving instruction set is
#: there. So who has the first of these needs the others, too.
_TOGETHER: Final[Mapping[str, Sequence[str]]] = {
    "avx512f": ("avx512bw", "avx512dq", "avx512vl"),
    "avx512_bf16": ("avx512_vnni",),
}


def features_of(cpuinfo: str) -> frozenset[str]:
    """The features that all CPUs in the text of a ``/proc/cpuinfo`` share, by Linux's names."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    found = [frozenset(values.split()) for name, _, values in lines if name.strip() in _LISTS]
    return frozenset.intersection(*found) if found else frozenset()


def missing_features(machine: str, features: frozenset[str]) -> list[str]:
    """What vLLM's CPU build needs and a CPU does not have.

    ``machine`` is that of `platform.machine`. Nothing is known of others than x86_64 and aarch64,
    and nothing of a CPU without features.
    """
    if not features or machine not in _NEEDED:
        return []
    needed = [*_NEEDED[machine]]
    for first, others in _TOGETHER.items():
        needed += others if first in features else ()
    return [feature for feature in needed if feature not in features]


def features_here() -> frozenset[str]:
    """The features of this host's CPUs; none where there is no ``/proc/cpuinfo``."""
    try:
        return features_of(_CPUINFO.read_text())
    except OSError:
        return frozenset()


def missing_here() -> list[str]:
    """What vLLM's CPU build needs and this host does not have."""
    return missing_features(platform.machine(), features_here())


def check_cpu() -> None:
    """Raise `DeviceUnusable` where vLLM's CPU build cannot run; before vLLM is imported."""
    missing = missing_here()
    if missing:
        raise DeviceUnusable(
            f"this CPU does not have {', '.join(missing)}, which vLLM's CPU build needs: use"
            " another host (x86: Intel since Haswell, AMD since Zen; ARM: v8.2 or later), or give a"
            " virtual machine the CPU model of its host"
        )


def request_amx() -> None:
    """Ask the kernel for AMX, which vLLM uses wherever the CPU has it.

    Linux lets a process use AMX's tile registers only after arch_prctl(ARCH_REQ_XCOMP_PERM)
    (https://docs.kernel.org/arch/x86/xstate.html), else its first tile instruction is a SIGILL. A
    fork inherits the permission, an exec loses it: so each process asks for itself, however it was
    started. Does nothing on a CPU without AMX.

    Raises `DeviceUnusable` where the kernel refuses.
    """
    import torch

    has_amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # vLLM asks it, too
    if has_amx and not torch.cpu._init_amx():  # noqa: SLF001  # has no public name
        raise DeviceUnusable(
            "this CPU has AMX, but the kernel does not let this process use it: use Linux 5.16 or"
            " newer, and allow the system call arch_prctl where a sandbox forbids it"
        )
