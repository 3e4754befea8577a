"""docs/batch.md names existing commands, options and codes, and its examples run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.batch.conftest import WriteLines, completion
from tests.batch.running import batch
from tests.cli.running import python
from tests.docs.pages import code, first_names, page, section
from tests.support.processes import Plant
from tokenyard.batch.answers import ENDED_CODES
from tokenyard.batch.state import ENDED
from tokenyard.cli.batch import COMMANDS

PAGE = page("docs/batch.md")
EXAMPLES = code(PAGE, "python")


def options_of(plant: Plant, command: str) -> str:
    return batch(plant, command, "--help").stdout


def test_operations_page_lists_every_command() -> None:
    told = {name.split()[1] for name in first_names(section(PAGE, "## Jobs at RQ")) if " " in name}
    assert {name for name in told if not name.startswith("-")} - {"JOB", "TIME"} == (
        set(COMMANDS) - {"run"}
    )


@pytest.mark.parametrize(
    ("command", "heading"), [("run", "## Running"), ("submit", "## Jobs at RQ")]
)
def test_every_option_on_the_page_exists(plant: Plant, command: str, heading: str) -> None:
    told = {name.split()[0] for name in first_names(section(PAGE, heading)) if name[0] == "-"}
    text = options_of(plant, command)
    assert told
    assert [option for option in told if option not in text] == []


def test_states_and_codes_are_those_of_the_code() -> None:
    assert all(f"`{status}`" in PAGE for status in ENDED)
    assert all(f"`{name}`" in PAGE for name in ENDED_CODES)


def test_commands_without_rq_do_not_import_it() -> None:
    probe = "import sys, tokenyard.batch.api; print({'rq', 'click', 'rich'} & sys.modules.keys())"
    done = python("-c", probe)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("at", range(len(EXAMPLES)))
def test_the_examples_run(plant: Plant, write_lines: WriteLines, tmp_path: Path, at: int) -> None:
    example = EXAMPLES[at]
    for library in ("datasets", "pandas"):
        if f" {library}" in example and importlib.util.find_spec(library) is None:
            compile(example, "batch.md", "exec")  # needs packages that Tokenyard does not require
            return
    write_lines("in.jsonl", [completion(1)])
    front = f"redis_url, yard = {plant.url!r}, {plant.keys.yard!r}\n"
    text = example.replace("redis_url=redis_url", "redis_url=redis_url, yard=yard")
    done = python("-c", front + text, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
