"""A program of a local yard, whose log somebody moves, deletes or empties."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tokenyard.cli.up.child import Child

Say = Callable[[str], None]
PROGRAM = """
import sys
for line in open(sys.argv[1]):
    print("2026-01-01 00:00:00,000 tokenyard.test:", line.strip(), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """A program that logs each line that is written to a pipe."""
    os.mkfifo(tmp_path / "said")
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "said")]
    child = Child("test", program, tmp_path / "logs" / "test.log", dict(os.environ), 30.0)
    (tmp_path / "logs").mkdir()
    child.start()
    yield child
    child.stop(lambda: False)


@pytest.fixture
def say(child: Child, tmp_path: Path) -> Iterator[Say]:
    with (tmp_path / "said").open("w") as pipe:

        def write(text: str) -> None:
            pipe.write(f"{text}\n")
            pipe.flush()
            heard: list[str] = []
            eventually(lambda: heard.extend(one.text for one in child.listen()) or text in heard)

        yield write


@pytest.mark.parametrize(
    "how", ["move", "delete", "delete the folder", "empty", "empty, and write at once"]
)
def test_a_log_that_goes_away_begins_again(child: Child, say: Say, how: str) -> None:
    # Given a program whose log
    say("earlier: a line that is longer than the next ones")
    match how:
        case "move":
            child.log.rename(child.log.with_suffix(".1"))
        case "delete":
            child.log.unlink()
        case "empty":
            os.truncate(child.log, 0)
        case "empty, and write at once":
            os.truncate(child.log, 0)
            with child.log.open("a") as log:
                log.write("another line of the same length, or longer than it was before\n" * 3)
        case _:
            child.log.unlink()
            child.log.parent.rmdir()

    # is gone, I expect it to be heard on, and a file of that name to have the rest.
    say("behind")
    say("behind: a line that is longer than any before, even longer than the first one")
    assert child.status is None
    assert "behind" in child.log.read_text()
    assert "earlier" not in child.log.read_text()
    assert child.error() == ""
