"""A yard shared by the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from tests.cli.running import Ask, StartUp, Up, tokenyard
from tests.support.builders import random_name
from tests.support.yard import PlayedYard
from tokenyard.cli import demo, main
from tokenyard.cli.up import Foreground
from tokenyard.cli.up.local_yard import LocalPlan
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts

#: Slow enough that a test can observe a request of thousands of tokens while it runs.
SLOW = {"TOKENYARD_WORKER_SIMULATED_STEP_S": "0.01"}


@pytest.fixture(scope="session")
def yard(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """A simulated yard with two workers; the JSON that it printed when it was ready."""
    up = Up(tmp_path_factory.mktemp("up"), "--grace-s", "1", env=SLOW)
    try:
        yield up.wait_ready()
    finally:
        up.end()


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    """A function that starts a yard for one test."""
    started: list[Up] = []

    def start(*arguments: str, **options: Any) -> Up:
        folder = tmp_path / f"up-{len(started)}"
        folder.mkdir()
        started.append(Up(folder, *arguments, **options))
        return started[-1]

    yield start
    for up in started:
        up.end()


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """A function that runs a command in this process, which finds no broker by chance."""
    monkeypatch.delenv("TOKENYARD_REDIS_URL", raising=False)
    monkeypatch.delenv("TOKENYARD_YARD", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))

    def run(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(main, arguments, **options)

    return run


@pytest.fixture
def ask(yard: dict[str, Any], invoke: Ask) -> Ask:
    """A function that runs a command on the shared yard."""

    def run(*arguments: str, **options: Any) -> Result:
        return invoke("--redis-url", yard["url"], *arguments, **options)

    return run


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[LocalPlan]:
    """The plans of `up` and `demo`, which then start nothing."""
    found: list[LocalPlan] = []
    monkeypatch.setattr(Foreground, "run", lambda this: found.append(this._plan))
    monkeypatch.setattr(demo, "_run", lambda plan, *_: found.append(plan) or [])
    return found


@pytest.fixture
def quiet(yard: dict[str, Any]) -> Iterator[PlayedYard]:
    """A yard of the shared broker without coordinator and workers."""
    keys = Keys(random_name("quiet"))
    with redis.Redis.from_url(yard["url"]) as connection:
        yield PlayedYard(connection, keys, Scripts(Yard(connection, keys)))


@pytest.fixture
def run(yard: dict[str, Any], quiet: PlayedYard) -> Callable[..., Any]:
    """A function that runs a command on the quiet yard, in a new process."""

    def run(*arguments: str, **options: Any) -> Any:
        place = ("--redis-url", yard["url"], "--yard", quiet.keys.yard)
        return tokenyard(*place, *arguments, **options)

    return run
