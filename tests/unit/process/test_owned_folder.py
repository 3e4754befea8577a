"""Temporary folders whose owner may be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenyard.process.home import owned_folder, remove_abandoned

PREFIX = "tokenyard-test-"
OWNER = f"""
import sys
from tokenyard.process.home import owned_folder
with owned_folder({PREFIX!r}) as folder:
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("a line")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def owner(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has such a folder until its input ends."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_is_gone_with_its_block() -> None:
    with owned_folder(PREFIX) as folder:
        (folder / "file").write_text("a line")
    assert not folder.exists()


def test_the_folder_of_a_killed_process_is_removed_and_no_other(temporary: Path) -> None:
    # Given the folders of two processes, one of which is killed, and what is no such folder
    foreign = temporary / f"{PREFIX}link"
    (temporary / "elsewhere").mkdir()
    foreign.symlink_to(temporary / "elsewhere")
    (temporary / f"{PREFIX}file").write_text("a line")
    with owner(temporary) as (killed, left), owner(temporary) as (_, living):
        killed.kill()
        killed.wait()
        assert (left / "inner" / "file").exists()
        # If a third one makes a folder, I expect that of the killed one to be gone alone.
        with owned_folder(PREFIX) as mine:
            assert not left.exists()
            assert (living / "inner" / "file").exists()
            remove_abandoned(PREFIX)
            assert mine.exists()
    assert foreign.is_symlink()
    assert (temporary / "elsewhere").is_dir()
    assert (temporary / f"{PREFIX}file").exists()


def test_a_folder_that_was_taken_for_an_abandoned_one_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given another process that looks between the making of a folder and its lock
    made = tempfile.mkdtemp
    seen: list[str] = []

    def make(**where: str) -> str:
        seen.append(made(**where))
        if len(seen) == 1:
            remove_abandoned(PREFIX)
        return seen[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with owned_folder(PREFIX) as folder:
        assert [str(folder)] == seen[1:]
        assert folder.is_dir()
