"""The installed vLLM: most tests hold for all supported versions, some for the newest."""

from __future__ import annotations

import re
from pathlib import Path

from tokenyard.process import extras


def installed_vllm() -> tuple[int, ...]:
    """Major and minor version of the GPU or CPU build; raises LookupError without one."""
    found = extras.installed_vllm()
    if found is None:
        raise LookupError("vLLM is not installed here")
    _, version = found
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def write_distribution(folder: Path, version: str = "0.32.0+cpu") -> None:
    """Write what is known of an installed vLLM without an import of it: a CPU build by default.

    With the folder first on `sys.path`, it takes the place of any real one.
    """
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
