"""The light installation, on another Python: what may need more than it has.

In a clone of its own, with the newest supported Python that is not this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Minor versions of Python 3, by preference.
MINORS = (13, 12, 11)

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def pythons() -> Iterator[Path]:
    """The others on this machine that have what `make install-light` needs."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for name in [f"python3.{minor}" for minor in MINORS if minor != sys.version_info.minor]:
        found = [shutil.which(name), *versions.glob(f"{name.removeprefix('python')}.*/bin/{name}")]
        for python in filter(None, found):
            # A shim of pyenv may exist and yet not run.
            if subprocess.run(
                [python, "-c", "import ensurepip"], check=False, capture_output=True
            ).returncode:
                continue
            yield Path(python)


def test_all_but_vllm_passes_on_another_python_without_torch(tmp_path: Path) -> None:
    """Tests of vLLM are skipped there, so it is no CI machine; the rest is the same as here."""
    python = next(pythons(), None)
    if python is None:
        reason = f"no other Python of {MINORS} is installed, so nothing was tested on a second one"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    outside = {name: value for name, value in os.environ.items() if name != "CI"}
    for command in (
        ["make", "install-light", f"PYTHON={python}"],
        [".venv/bin/tox", "run", "-e", "types-light,fast"],
    ):
        done = subprocess.run(
            command, cwd=clone, env=outside, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
