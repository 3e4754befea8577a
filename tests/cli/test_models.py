"""`tokenyard models` against a running yard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.running import Up, said, tokenyard
from tokenyard.process.program import Exit

MODELS = """
[models.one]
path = "org/one"
[models.two]
path = "org/two"
[models.wide]
path = "org/wide"
tensor_parallel_size = 3
"""
#: Slow enough that a command can observe a load.
SLOW_LOADS = {"TOKENYARD_WORKER_SIMULATED_LOAD_S": "0.3"}
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def models_yard(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a yard with two devices, three models and one sleeping process."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(MODELS)
    options = ("--models", str(folder / "models.toml"), "--sleepers", "1", "--grace-s", "1")
    up = Up(folder, *options, env=SLOW_LOADS)
    try:
        yield str(up.wait_ready()["url"])
    finally:
        up.end()


@pytest.fixture
def run(models_yard: str) -> Iterator[Run]:
    """A function that runs `tokenyard models ...`; all models are unloaded after the test."""

    def run(*arguments: str) -> Any:
        return tokenyard("--redis-url", models_yard, "models", *arguments)

    yield run
    for model in ("one", "two"):
        done = run("unload", model)
        assert done.returncode == Exit.OK, done.stderr


def holders(run: Run, model: str) -> dict[str, str]:
    """Workers that hold a model, by name, with their states."""
    [listed] = [one for one in said(run("list", "--json"))["models"] if one["name"] == model]
    return {one["name"]: one["state"] for one in listed["workers"]}


@pytest.mark.long
def test_a_model_is_loaded_listed_and_unloaded(run: Run) -> None:
    loaded = said(run("load", "one", "--json"))
    assert (loaded["unacknowledged"], loaded["redundant"], len(loaded["workers"])) == ([], False, 1)
    assert list(holders(run, "one").values()) == ["ready"]
    again = run("load", "one")
    assert (again.returncode, again.stdout.split(" by ")[0]) == (Exit.OK, "one: loaded already")

    assert said(run("unload", "one", "--json"))["workers"]
    assert holders(run, "one") == {}
    again = run("unload", "one")
    assert (again.returncode, again.stdout) == (Exit.OK, "one: no worker holds it\n")


@pytest.mark.long
def test_models_sleep_and_wake(run: Run) -> None:
    said(run("load", "one", "--json"))
    assert run("sleep", "one").stdout.startswith("one: asleep: ")
    assert list(holders(run, "one").values()) == ["asleep"]
    assert run("sleep", "one").stdout == "one: no worker has it ready\n"
    assert run("wake", "one").stdout.startswith("one: awake: ")
    assert list(holders(run, "one").values()) == ["ready"]
    assert run("wake", "one").stdout == "one: no worker sleeps with it\n"


@pytest.mark.long
def test_the_table_shows_places_and_load_times(run: Run) -> None:
    said(run("load", "one", "--json"))
    table = run("list").stdout
    [line] = [line for line in table.splitlines() if line.startswith("one ")]
    for words in ("ready", "RUNNING"):
        assert words in line
    took = re.search(r"\(([0-9.]+)", line)
    assert took
    assert 0.3 <= float(took[1]) < 60


@pytest.mark.long
def test_a_reload_starts_a_new_epoch(run: Run) -> None:
    said(run("load", "one", "--json"))
    reloaded = said(run("reload", "one", "--path", "/step-1", "--json"))
    assert (reloaded["epoch"], reloaded["run_state"], reloaded["unacknowledged"]) == (
        1,
        "RUNNING",
        [],
    )
    [model] = [each for each in said(run("list", "--json"))["models"] if each["name"] == "one"]
    assert (model["weights"], model["epoch"], model["run_state"]) == ("/step-1", 1, "RUNNING")
    [worker] = model["workers"]
    assert (worker["weights"], worker["epoch"], worker["run_state"]) == ("/step-1", 1, "RUNNING")

    own = run("reload", "one", "--path", "", "--epoch", "7", "--mode", "wait")
    assert (own.returncode, own.stdout) == (Exit.OK, "one: its own weights, in epoch 7\n")
    same = run("reload", "one", "--path", "", "--epoch", "8")
    assert same.returncode == Exit.OK, same.stderr


@pytest.mark.long
def test_a_failed_reload_leaves_the_model_unchanged(run: Run) -> None:
    said(run("reload", "two", "--path", "", "--epoch", "6", "--json"))
    said(run("load", "two", "--json"))

    failed = run("reload", "two", "--path", "/w/broken", "--epoch", "7")

    assert failed.returncode == Exit.FAILED
    (line,) = failed.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "/w/broken: broken weights; two is RUNNING with its own weights in epoch 6" in line
    [model] = [each for each in said(run("list", "--json"))["models"] if each["name"] == "two"]
    assert (model["weights"], model["epoch"], model["run_state"]) == ("", 6, "RUNNING")
    [worker] = model["workers"]
    assert (worker["weights"], worker["epoch"], worker["run_state"]) == ("", 6, "RUNNING")
