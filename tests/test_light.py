"""The light installation: what may need more than it has, in a clone of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_types_and_unit_tests_pass_without_torch_and_vllm(tmp_path: Path) -> None:
    """Tests of vLLM are skipped there, so it is no CI machine; the rest is the same as here."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    outside = {name: value for name, value in os.environ.items() if name != "CI"}
    for command in (["make", "install-light"], [".venv/bin/tox", "run", "-e", "types-light,unit"]):
        done = subprocess.run(
            command, cwd=clone, env=outside, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
