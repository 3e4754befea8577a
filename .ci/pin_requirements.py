"""Resolves requirements.in into requirements.txt with every package pinned (`make requirements`).

A dry run of pip resolves, so the list is what pip would install, minus three packages that vLLM
pins and one that is optional for vLLM: see `LEFT_OUT`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent

#: Package -> why it is not installed.
LEFT_OUT: Final = {
    "torchvision": "for images; as a CUDA build it breaks `import vllm` on a host without a GPU",
    "torchaudio": "for sound; as torchvision",
    "torchcodec": "for video; as torchvision",
    "triton": "compiles GPU kernels; 1 GB",
}

HEADER: Final = """\
# Made by `make requirements` from requirements.in, for Python 3.11 on Linux; do not edit.
# Install with `pip install --no-deps -r requirements.txt`, as `make install` does: the list is
# complete, except for what vLLM pins and text models do not need:
"""


def main() -> None:
    """Write requirements.txt; exits with pip's code if pip finds no solution."""
    pins = dict(sorted(_pin(item["metadata"]) for item in _resolve()))
    why = "".join(f"#   {name}: {reason}\n" for name, reason in LEFT_OUT.items())
    lines = "".join(f"{n}=={v}\n" for n, v in pins.items() if n not in LEFT_OUT)
    (ROOT / "requirements.txt").write_text(HEADER + why + lines, encoding="utf-8")
    print(f"{len(pins)} packages, {len(pins.keys() & LEFT_OUT.keys())} of them left out")


def _resolve() -> list[dict[str, Any]]:
    """The packages that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command = [*pip, "--report", str(report), "-r", str(ROOT / "requirements.in")]
        code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        if code:
            sys.exit(code)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return found


def _pin(metadata: dict[str, str]) -> tuple[str, str]:
    """The normalized name (PEP 503), and the version without the builder's tag ("+cpu")."""
    name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
    return name, metadata["version"].partition("+")[0]


if __name__ == "__main__":
    main()
