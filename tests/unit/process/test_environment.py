"""Variables that nobody reads, and names that may have been meant."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT
from tokenyard.process.program import misspelt, unknown, variables_of

BOTH = ("coordinator", "worker")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TOKENYARD_COORDINATOR_LAESE_MS", "TOKENYARD_COORDINATOR_LEASE_MS"),
        ("TOKENYARD_COORDINATOR_lease_ms", "TOKENYARD_COORDINATOR_LEASE_MS"),
        ("TOKENYARD_WORKER_GRACE", "TOKENYARD_WORKER_GRACE_S"),
        ("TOKENYARD_WOKER_GRACE_S", "TOKENYARD_WORKER_GRACE_S"),
        ("TOKENYARD_REDIS_URI", "TOKENYARD_REDIS_URL"),
        ("TOKENYARD_YRAD", "TOKENYARD_YARD"),
    ],
)
def test_a_similar_name_is_suggested(name: str, meant: str) -> None:
    assert misspelt({name: "1"}, BOTH) == [
        f"nothing reads the variable {name}; did you mean {meant}?"
    ]
    assert unknown({name: "1"}, BOTH) == []


@pytest.mark.parametrize("name", [*variables_of("worker"), "TOKENYARD_REDIS_URL", "TOKENYARD_YARD"])
def test_known_variables_are_not_reported(name: str) -> None:
    for programs in ((), ("coordinator",), ("worker",), BOTH):
        assert misspelt({name: "1"}, programs) == unknown({name: "1"}, programs) == []


def test_each_command_minds_what_it_would_read() -> None:
    environment = {"TOKENYARD_WORKER_GRACE": "1"}
    assert misspelt(environment, ()) == misspelt(environment, ("coordinator",)) == []
    assert unknown(environment, ("coordinator",)) == []
    assert misspelt(environment, ("worker",))


def test_dissimilar_variables_are_reported_for_settings_only() -> None:
    environment = {"TOKENYARD_WORKER_QQQQ": "1", "TOKENYARD_QQQQ": "1", "PATH": "x"}
    assert misspelt(environment, BOTH) == []
    assert unknown(environment, BOTH) == ["nothing reads the variable TOKENYARD_WORKER_QQQQ"]


@pytest.mark.parametrize(
    "name",
    [
        "TOKENYARD_REDIS_SERVICE_HOST",
        "TOKENYARD_REDIS_SERVICE_PORT",
        "TOKENYARD_REDIS_SERVICE_PORT_REDIS",
        "TOKENYARD_REDIS_PORT",
        "TOKENYARD_REDIS_PORT_6379_TCP_ADDR",
        "TOKENYARD_WORKER_SERVICE_HOST",
        "TOKENYARD_WORKER_PORT",
        "TOKENYARD_SERVICE_PORT",
    ],
)
def test_variables_of_kubernetes_are_ignored(name: str) -> None:
    assert misspelt({name: "1"}, BOTH) == unknown({name: "1"}, BOTH) == []


def test_variables_of_this_project_are_known() -> None:
    """Given all variables that code, tests and deployments name whole, I expect no complaint."""
    wrong = {"TOKENYARD_COORDINATOR_LAESE_MS", "TOKENYARD_REDIS_URI"}  # as examples of mistakes
    files = [
        file
        for folder in ("deploy", "docs", "tokenyard", "worker", "coordinator", "benchmarks")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".md", ".yaml", ".env", ".service", ".sh"}
    ]
    text = "\n".join(file.read_text() for file in files)
    named = set(re.findall(r"(?<![\w$])TOKENYARD_[A-Z_]*[A-Z](?![\w<{])", text)) - wrong
    assert len(named) > 8
    assert misspelt(dict.fromkeys(named, ""), BOTH) == unknown(dict.fromkeys(named, ""), BOTH) == []
