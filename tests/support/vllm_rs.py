"""The program `vllm-rs`, out of the wheels of vLLM."""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

from tests.support.wheels import UNPACKED, fetch_wheel


def vllm_rs(version: str) -> Path:
    """The folder with `vllm-rs` of a version, which is downloaded once (326 MB)."""
    folder = UNPACKED / "vllm-rs" / version
    program = folder / "vllm-rs"
    if program.exists():
        return folder
    kinds = [f"--platform=manylinux_2_{minor}_{platform.machine()}" for minor in (28, 31, 34, 35)]
    wheel = fetch_wheel(f"vllm=={version}", folder, "--only-binary", ":all:", *kinds)
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (one for one in packed.namelist() if one.endswith("/vllm-rs"))
        written = folder / "vllm-rs.new"
        written.write_bytes(packed.read(name))
    written.chmod(0o755)
    written.rename(program)
    wheel.unlink()
    return folder
