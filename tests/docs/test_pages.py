"""The other documents name what there is."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from typing import Any

import pytest

from tests.docs.pages import ROOT, code, first_names, names, page, rows, section
from tokenyard.cli import COMMANDS
from tokenyard.protocol.control import RUN_STATES, TRANSITIONS
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.http_settings import BoardSettings
from tokenyard.protocol.replies import TERMINAL
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings
from worker.host.process_state import State

SETTINGS = {
    "## Coordinator": CoordinatorSettings,
    "## Worker": WorkerSettings,
    "## Gateway": GatewaySettings,
    "## Board": BoardSettings,
}
#: They give their metrics, but no traces, and read no lane.
SERVING = (BoardSettings, GatewaySettings)
SCRIPTS = {file.stem for file in (ROOT / "tokenyard/scripts/lua").glob("*.lua")}
#: Programs that others start.
PARTS = {
    *("broker_bursts.py", "cycles_child.py", "llama_weights.py"),
    *("pooling_child.py", "pooling_http.py", "pooling_models.py"),
}
TRANSITION = re.compile(r"^ +(\S+) --> (\S+):", re.MULTILINE)
DECISIONS = sorted((ROOT / "docs/decisions").iterdir())
HERE = [ROOT, *(ROOT / part for part in ("tokenyard", "coordinator", "gateway", "worker"))]
HERE += [ROOT / "worker" / "engines", ROOT / "benchmarks", ROOT / "tests" / "deploy"]
PROSE = (
    "README.md",
    "benchmarks/README.md",
    *(str(file.relative_to(ROOT)) for file in (*sorted((ROOT / "docs").glob("*.md")), *DECISIONS)),
)


@pytest.mark.parametrize("heading", SETTINGS)
def test_every_setting_is_explained_with_its_default(heading: str) -> None:
    settings = page("docs/settings.md")
    text = section(settings, "## All programs") + section(settings, heading)
    fields = {field.name: field for field in dataclasses.fields(SETTINGS[heading])}
    others = (
        {"block_ms", "reply_maxlen", "otlp_endpoint"} if SETTINGS[heading] in SERVING else set()
    )
    assert first_names(text) == set(fields) | others
    for row in rows(text):
        if row[0].strip("`") in others:
            continue
        default = fields[row[0].strip("`")].default
        assert _is_told(default, row[1].replace("`", "")), row


def test_the_page_of_failures_names_settings_that_exist() -> None:
    settings = {field.name for kind in SETTINGS.values() for field in dataclasses.fields(kind)}
    written = names(page("docs/failures.md"))
    named = {name for name in written if re.fullmatch("[a-z]+(_[a-z]+)+", name)}
    # Of requests, of clients and of vLLM, and a call of Linux.
    named -= {"cancel_on_disconnect", "result_timeout_s", "result_ttl", "retry_after_s"}
    named -= {"arch_prctl", "gpu_memory_utilization"}
    assert named <= settings
    assert {"hang_timeout_s", "max_crashes", "max_lost_alone", "max_faults"} <= named


def test_every_failure_says_what_is_seen_and_done() -> None:
    text = page("docs/failures.md")
    headings = set(re.findall(r"^## (.+)$", text, re.MULTILINE))
    assert len(headings) > 20
    # A question, and one that refers to another.
    for heading in headings - {"Requests wait and nothing happens", "A GPU host vanishes"}:
        told = section(text, f"## {heading}")
        assert all(f"*{part}*" in told for part in ("You see", "The system", "You do")), heading


def test_every_benchmark_is_listed_with_its_method() -> None:
    text = page("benchmarks/README.md")
    questions = {
        name for row in rows(text) for name in re.findall(r"^\[(\w+(?:\.py)?)\]\(", row[0])
    }
    folder = ROOT / "benchmarks"
    programs = {file.parent.name for file in folder.glob("*/__main__.py")} | {
        file.name
        for file in folder.glob("*.py")
        if "__main__" in file.read_text(encoding="utf-8") and file.name not in PARTS
    }
    assert questions == programs
    for name in questions:
        assert f"python -m benchmarks.{name.removesuffix('.py')}" in section(text, f"## {name}")


def _is_told(default: Any, told: str) -> bool:
    if isinstance(default, bool):
        return told == ("on" if default else "off")
    if isinstance(default, int):
        return told.partition(":")[0] == str(default)
    if isinstance(default, float):
        return told.partition(":")[0] == f"{default:.10g}"
    return not isinstance(default, str) or not default or told == default


def test_the_diagrams_have_the_states_of_the_code() -> None:
    request, lease, process = code(page("docs/states.md"), "mermaid")
    assert _states(request) == {"waiting", "assigned"} | TERMINAL
    assert _states(lease) == {"held", "lost", "left", "crashed"}
    assert _states(process) == {state.value for state in State}


def test_the_table_of_desired_states_is_that_of_the_code() -> None:
    told = {}
    for signal, *cells, _ in rows(section(page("docs/states.md"), "## A desired state")):
        allowed, idempotent, leads_to = (frozenset(names(cell)) for cell in cells)
        told[signal.strip("`")] = (allowed, idempotent, next(iter(leads_to), None))
    table = {
        signal: (rule.allowed, rule.idempotent, rule.leads_to)
        for signal, rule in TRANSITIONS.items()
    }
    assert told == table
    assert {state for *_, leads_to in told.values() if (state := leads_to)} == set(RUN_STATES)


def _states(diagram: str) -> set[str]:
    return {state for pair in TRANSITION.findall(diagram) for state in pair} - {"[*]"}


def test_the_states_page_tells_what_each_script_does() -> None:
    assert names(page("docs/states.md")) >= SCRIPTS


@pytest.mark.parametrize("name", PROSE)
def test_files_that_are_named_exist(name: str) -> None:
    written = {word for word in names(page(name)) if re.fullmatch(r"[\w./-]+\.(py|lua|toml)", word)}
    written -= {"tokenyard/scripts/lua/include/name.lua"}  # a placeholder
    assert not {word for word in written if not _is_here(word)}


def test_the_path_of_a_request_enters_each_file_once() -> None:
    path = section(page("docs/architecture.md"), "## The path of a request")
    files = [name for row in rows(path) for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(files) > 10
    assert len(files) == len(set(files))
    assert [file for file in files if not _is_here(file)] == []


def _is_here(file: str) -> bool:
    return any((folder / file).exists() for folder in HERE)


def test_the_index_lists_every_decision() -> None:
    listed = set(re.findall(r"\(decisions/([\w.-]+)\)", page("docs/README.md")))
    assert listed == {file.name for file in DECISIONS}


def test_the_python_of_the_readme_compiles() -> None:
    ours, by_openai = code(page("README.md"), "python")
    for example in (ours, by_openai):
        compile(example, "README.md", "exec")
        assert len(example.splitlines()) <= 16
    assert "from openai import OpenAI" in by_openai


def test_what_the_readme_tells_to_type_exists() -> None:
    readme = page("README.md")
    project = tomllib.loads(page("pyproject.toml"))["project"]
    extras = {
        extra
        for name in PROSE
        for found in re.findall(r"'\.\[([\w,-]+)\]'", page(name))
        for extra in found.split(",")
    }
    assert extras <= set(project["optional-dependencies"])
    targets = set(re.findall(r"^    make (\w+)", readme, re.MULTILINE))
    assert targets == {"demo", "test"}
    assert all(f"\n{target}:" in page("Makefile") for target in targets)
    commands = set(re.findall(r"^    \.venv/bin/tokenyard (\w+)", readme, re.MULTILINE))
    assert commands
    assert commands <= set(COMMANDS)
