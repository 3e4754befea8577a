"""A program that is forked from one that runs already."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.zygote import the_zygote


def test_it_imports_from_the_folders_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that forks, which began without this folder
    (tmp_path / "found.py").write_text("print('found')")
    log = tmp_path / "log"
    zygote = the_zygote()

    # If a program begins with it
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status = zygote.start("found", [], log).wait(60.0)

    assert (status, log.read_text()) == (0, "found\n")
