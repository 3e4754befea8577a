"""docs/python.md: its blocks run, and its tree is that of the errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest

import tokenyard
from tests.docs.pages import ROOT, code, page
from tests.support.processes import Plant
from tests.support.servers import Server
from tokenyard import TokenyardError

PAGE = page("docs/python.md")
BLOCKS = code(PAGE, "python")
NEEDS_TRANSFORMERS = [block for block in BLOCKS if "tokenizer=" in block]


@pytest.fixture(scope="module")
def yard(valkey_broker: Server) -> Iterator[Plant]:
    with Plant(valkey_broker.url) as plant:
        plant.coordinator()
        plant.worker(slots=1)
        plant.wait_for_workers(1)
        yield plant


def run(plant: Plant, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block as a program of its own would, but for the time to start one."""
    monkeypatch.setenv("TOKENYARD_REDIS_URL", plant.url)
    monkeypatch.setenv("TOKENYARD_YARD", plant.keys.yard)
    monkeypatch.chdir(ROOT)
    exec(compile(block, "docs/python.md", "exec"), {"__name__": "__main__"})


def test_the_blocks_run(
    yard: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, block in enumerate(BLOCKS):
        if block in NEEDS_TRANSFORMERS:
            continue
        run(yard, block, monkeypatch)
        assert capsys.readouterr().out, number


@pytest.mark.long
def test_the_block_with_a_tokenizer_runs(
    yard: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    [block] = NEEDS_TRANSFORMERS
    run(yard, block, monkeypatch)
    assert capsys.readouterr().out


def test_the_tree_is_that_of_the_errors() -> None:
    [tree] = code(PAGE, "text")
    told: dict[str, str] = {}
    path: list[str] = []
    for line in tree.splitlines():
        indent, name = re.findall(r"^([│├└─ ]*)(\w+)", line)[0]
        path[len(indent) // 4 :] = [name]
        told[name] = path[-2] if len(path) > 1 else "Exception"
    errors = [getattr(tokenyard, name) for name in tokenyard.__all__]
    found = [one for one in errors if inspect.isclass(one) and issubclass(one, TokenyardError)]
    assert told == {one.__name__: one.__bases__[0].__name__ for one in found}


def test_the_page_names_each_method_of_a_client() -> None:
    public = {name for name in vars(tokenyard.Client) if not name.startswith("_")}
    told = public - {"start", "close", "client_id", "wait_for"}
    assert [name for name in sorted(told) if not re.search(rf"\b{name}\b", PAGE)] == []
