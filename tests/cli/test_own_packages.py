"""A user's own `worker.py` is never taken for Tokenyard's package, nor the reverse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import ROOT, Command, StartUp, python, tokenyard
from tests.support.waiting import eventually
from tokenyard.process.program import Exit

WAIT_S = 100.0
USERS = "raise RuntimeError('a module of the user')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules that must not be imported."""
    users = tmp_path / "mine"
    users.mkdir()
    for name in ("worker", "coordinator"):
        (users / f"{name}.py").write_text(USERS)
    monkeypatch.chdir(users)
    return users


@pytest.mark.long
@pytest.mark.parametrize("path", [str(ROOT), f".:{ROOT}"], ids=["here", "PYTHONPATH=."])
def test_a_yard_runs_beside_modules_of_these_names(
    start_up: StartUp, folder: Path, path: str
) -> None:
    # Given a yard that starts in that folder
    up = start_up("--slots", "1", env={"PYTHONPATH": path})
    url = str(up.wait_ready()["url"])
    log = (up.data_dir / "logs" / "worker.log").read_text()
    assert "could be started" not in log, "the fork-server has imported our package"

    # I expect it to serve,
    done = tokenyard("--redis-url", url, "submit", "--json", "hello", env={"PYTHONPATH": path})
    assert done.returncode == Exit.OK, done.stderr
    assert json.loads(done.stdout)["status"] == "completed"

    # and to run batch jobs.
    (folder / "in.jsonl").write_text('{"id": "1", "prompt": "one"}\n')
    job = tokenyard("--redis-url", url, "batch", "submit", "in.jsonl", "-o", "out.jsonl")
    assert job.returncode == Exit.OK, job.stderr
    done = tokenyard("--redis-url", url, "batch", "worker", "--burst", env={"PYTHONPATH": path})
    assert done.returncode == Exit.OK, done.stderr
    assert json.loads((folder / "out.jsonl").read_text())["custom_id"] == "1"


@pytest.mark.long
def test_a_worker_is_started_beside_modules_of_these_names(
    start_up: StartUp, folder: Path, tmp_path: Path
) -> None:
    url = str(start_up("--slots", "1").wait_ready()["url"])
    words = ("--redis-url", url, "worker", "--engine", "simulated", "--name", "other")
    with Command(tmp_path / "log", *words) as worker:
        eventually(lambda: "engine simulated is up" in worker.said, timeout_s=WAIT_S)
        worker.process.terminate()
        assert worker.process.wait(WAIT_S) == Exit.OK
    assert "could be started" not in worker.said


@pytest.mark.long
def test_a_program_with_its_own_worker_module_can_be_a_client(
    start_up: StartUp, folder: Path
) -> None:
    url = str(start_up("--slots", "1").wait_ready()["url"])
    (folder / "worker.py").write_text("MINE = True\n")
    (folder / "program.py").write_text(
        "import worker, tokenyard\n"
        f"with tokenyard.Client({url!r}) as client:\n"
        "    print(worker.MINE, client.submit('hello', max_tokens=2).result(timeout=60).ok)\n"
    )
    done = python("program.py")
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.long
@pytest.mark.parametrize("command", ["worker", "coordinator"])
def test_a_foreign_module_that_is_found_first_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"{folder}:{ROOT}"
    done = tokenyard("--redis-url", "redis://127.0.0.1:1", command, env={"PYTHONPATH": path})
    assert done.returncode == Exit.USAGE
    (line,) = done.stderr.splitlines()
    assert f"the module {command!r} is at {folder / command}.py, which is not Tokenyard's" in line
    assert "rename it" in line

    # Other commands and the list of commands work.
    done = tokenyard("--help", env={"PYTHONPATH": path})
    assert done.returncode == Exit.OK
    assert "submit" in done.stdout

    # `up` passes the error on.
    done = tokenyard(
        "up", "--engine", "simulated", "--data-dir", str(tmp_path), env={"PYTHONPATH": path}
    )
    assert done.returncode == Exit.FAILED
    named = [f"{folder / name}.py, which is not Tokenyard's" for name in ("coordinator", "worker")]
    assert any(one in done.stderr for one in named), done.stderr  # whichever ends first
    assert "Traceback" not in done.stderr
