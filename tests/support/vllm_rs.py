"""The program `vllm-rs`, out of the wheels of vLLM."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from pathlib import Path

#: Beside tox's environments, which no commit has either.
_FOLDER = Path(__file__).parents[2] / ".tox" / "vllm-rs"
_DOWNLOAD_S = 900


def vllm_rs(version: str) -> Path:
    """The folder with `vllm-rs` of a version, which is downloaded once (326 MB)."""
    folder = _FOLDER / version
    program = folder / "vllm-rs"
    if program.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [f"manylinux_2_{minor}_{platform.machine()}" for minor in (28, 31, 34, 35)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    command += ["--only-binary", ":all:", *(f"--platform={kind}" for kind in kinds)]
    subprocess.run([*command, f"vllm=={version}"], check=True, timeout=_DOWNLOAD_S)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (one for one in packed.namelist() if one.endswith("/vllm-rs"))
        written = folder / "vllm-rs.new"
        written.write_bytes(packed.read(name))
    written.chmod(0o755)
    written.rename(program)
    wheel.unlink()
    return folder
