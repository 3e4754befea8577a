"""Resolves requirements.in into requirements.txt with every package pinned (`make requirements`).

uv resolves for every Python and machine of `TARGETS` at once, and keeps what is pinned already
unless `--upgrade` is given. Left out are three packages that vLLM pins and one that is optional for
vLLM: see `LEFT_OUT`.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parent.parent
PINS: Final = ROOT / "requirements.txt"

#: Debian 12 and 13, Ubuntu 24.04, and the last 3.11.
PYTHONS: Final = ("3.11.2", "3.11.14", "3.12.3", "3.13.5")
TARGETS: Final = [
    {
        "python_full_version": version,
        "python_version": version.rpartition(".")[0],
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    for version, machine in itertools.product(PYTHONS, ("x86_64", "aarch64"))
]

#: Package -> why it is not installed.
LEFT_OUT: Final = {
    "torchvision": "for images; as a CUDA build it breaks `import vllm` on a host without a GPU",
    "torchaudio": "for sound; as torchvision",
    "torchcodec": "for video; as torchvision",
    "triton": "compiles GPU kernels; 1 GB",
}

HEADER: Final = f"""\
# Made by `make requirements` from requirements.in, for Python {PYTHONS[0]} to 3.13 on Linux; do
# not edit. Install with `pip install --no-deps -r requirements.txt`, as `make install` does: the
# list is complete, except for what vLLM pins and text models do not need:
"""


def main() -> None:
    """Write requirements.txt; exits with uv's code if it finds no solution."""
    with tempfile.TemporaryDirectory() as folder:
        resolved = Path(folder, PINS.name)
        resolved.write_bytes(PINS.read_bytes())
        code = subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", "--universal"),
                *("--python-version", PYTHONS[0], "--no-header", "--no-annotate", "--quiet"),
                *("--index-strategy", "unsafe-best-match", *_indexes()),
                *("--output-file", str(resolved), str(ROOT / "requirements.in"), *sys.argv[1:]),
            ],
            check=False,
        ).returncode
        if code:
            sys.exit(code)
        pins = [*_pins(resolved.read_text("utf-8"))]
    why = "".join(f"#   {name}: {reason}\n" for name, reason in LEFT_OUT.items())
    PINS.write_text(HEADER + why + "".join(f"{pin}\n" for pin in pins), "utf-8")
    print(f"{len(pins)} pins")


def _indexes() -> Iterator[str]:
    """Where pip looks for packages, which uv does not read."""
    options = {
        "index-url": "--default-index",
        "extra-index-url": "--index",
        "find-links": "--find-links",
    }
    pip = [sys.executable, "-m", "pip", "config", "list"]
    for line in subprocess.run(pip, check=True, capture_output=True, text=True).stdout.splitlines():
        name, _, value = line.partition("=")
        if option := options.get(name.rpartition(".")[2]):
            for one in value.strip("'").split():
                yield from (option, one)


def _pins(resolved: str) -> Iterator[str]:
    """The lines for our targets, without a builder's tag ("+cpu") or a marker that always holds."""
    for line in filter(None, resolved.splitlines()):
        wanted = Requirement(line)
        holds = [_holds(wanted.marker, target) for target in TARGETS]
        if wanted.name not in LEFT_OUT and any(holds):
            pin = f"{wanted.name}{wanted.specifier}".partition("+")[0]
            yield pin if all(holds) else f"{pin} ; {wanted.marker}"


def _holds(marker: Marker | None, target: dict[str, str]) -> bool:
    return marker is None or marker.evaluate(target)


if __name__ == "__main__":
    main()
