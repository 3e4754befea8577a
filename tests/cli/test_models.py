"""`tokenyard models` against a running yard, and the choice of a load's target."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.running import Up, said, tokenyard
from tests.support.waiting import eventually
from tokenyard.admin.model_placement import LoadTarget, NoPlace, place_anywhere, place_at
from tokenyard.admin.snapshot import WorkerView, YardView
from tokenyard.process.program import Exit
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo, WorkerState

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
def test_load_on_a_named_worker_replaces_its_model(run: Run) -> None:
    said(run("load", "one", "--json"))
    [(name, _)] = holders(run, "one").items()
    moved = run("load", "two", "--worker", name, "--why", "the test says so")
    assert moved.returncode == Exit.OK, moved.stderr
    assert list(holders(run, "two").values()) == ["ready"]
    assert eventually(lambda: list(holders(run, "one").values()) == ["asleep"])


@pytest.mark.long
def test_two_models_are_loaded_on_two_devices(run: Run) -> None:
    said(run("load", "one", "--json"))
    said(run("load", "two", "--json"))
    assert [*holders(run, "one").values(), *holders(run, "two").values()] == ["ready", "ready"]


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
def test_worker_without_an_answer_is_named(run: Run) -> None:
    late = run("load", "one", "--timeout", "0")
    assert late.returncode == Exit.UNAVAILABLE
    assert "1 worker has not obeyed after 0 s" in late.stderr
    assert ": has not answered" in late.stderr
    said(run("load", "one", "--json"))  # continues with that load


@pytest.mark.long
def test_refusal_is_printed_with_its_reason(run: Run) -> None:
    name = said(run("load", "one", "--json"))["workers"][0]
    refused = run("load", "wide", "--worker", name, "--json")
    assert refused.returncode == Exit.UNAVAILABLE
    [unacknowledged] = json.loads(refused.stdout)["unacknowledged"]
    assert unacknowledged["worker"] == name
    assert "takes 3 of this host's 2 devices" in unacknowledged["reason"]


@pytest.mark.long
def test_no_wait_only_gives_the_signal(run: Run) -> None:
    told = run("load", "one", "--no-wait")
    assert told.returncode == Exit.OK
    assert told.stdout.startswith("one: is to be loaded by ")
    assert eventually(lambda: list(holders(run, "one").values()) == ["ready"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("load", "onee"),
            "there is no model 'onee'; did you mean one? Known models: one, two, wide",
        ),
        (("unload", "three"), "there is no model 'three'"),
        (("load", "one", "--worker", "nobody"), "there is no worker 'nobody'. Known workers: "),
        (("load", "wide"), "no device is free or idle for 'wide'"),
        (("reload", "onee", "--path", "/new"), "there is no model 'onee'"),
    ],
)
def test_impossible_loads_fail_with_a_hint(run: Run, arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.returncode == Exit.FAILED
    assert reason in done.stderr


def test_a_relative_path_is_wrong_usage(run: Run) -> None:
    done = run("reload", "one", "--path", "step-200")
    assert done.returncode == Exit.USAGE
    assert "give an absolute path" in done.stderr


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
@pytest.mark.parametrize(
    ("name", "is_held"), [("broken", True), ("broken", False), ("corrupt", True)]
)
def test_a_failed_reload_leaves_the_model_unchanged(run: Run, name: str, *, is_held: bool) -> None:
    """Given weights that the check of the files or every worker refuses."""
    said(run("reload", "two", "--path", "", "--epoch", "6", "--json"))
    if is_held:
        said(run("load", "two", "--json"))

    failed = run("reload", "two", "--path", f"/w/{name}", "--epoch", "7")

    assert failed.returncode == Exit.FAILED
    (line,) = failed.stderr.splitlines()
    assert line.startswith("Error: ")
    assert f"/w/{name}: {name} weights; two is RUNNING with its own weights in epoch 6" in line
    [model] = [each for each in said(run("list", "--json"))["models"] if each["name"] == "two"]
    assert (model["weights"], model["epoch"], model["run_state"]) == ("", 6, "RUNNING")
    assert model["workers"] or not is_held
    for worker in model["workers"]:
        assert (worker["weights"], worker["epoch"], worker["run_state"]) == ("", 6, "RUNNING")


# Target of a load


def worker(
    name: str, state: WorkerState, device: int, model: str = "", lane: int = 0, **more: Any
) -> WorkerView:
    info = WorkerInfo(name=name, state=state, model=model, controller="host", device=device, **more)
    return WorkerView(f"{name}.1", state, lane, 1000, info)


def yard(*workers: WorkerView, ranks: int = 1) -> YardView:
    host = HostInfo(name="host", models=[ModelInfo(name="m", ranks=ranks), ModelInfo(name="n")])
    return YardView("main", None, {}, 0, workers, {}, {}, [host])


FREE = worker("free", "warm", 0)
BUSY = worker("busy", "ready", 1, "n", lane=3)
IDLE = worker("idle", "ready", 2, "n")
SLEEPER = worker("sleeper", "asleep", 3, "m")


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([FREE, BUSY, IDLE, SLEEPER], "sleeper.1"),
        ([BUSY, IDLE, FREE], "free.1"),
        ([BUSY, IDLE], "idle.1"),
        ([IDLE, worker("other", "asleep", 2, "m"), worker("idle-2", "ready", 1, "n")], "idle.1"),
        ([worker("paused", "warm", 0, run_state="PAUSED"), IDLE], "idle.1"),
    ],
)
def test_load_target_displaces_the_least(workers: list[WorkerView], chosen: str) -> None:
    assert place_anywhere(yard(*workers), "m") == LoadTarget(chosen)


def test_a_group_is_loaded_on_its_devices_of_one_host() -> None:
    follower = worker("follower", "attached", 0)
    leader = worker("leader", "ready", 1, "n", group=["leader", "follower"])
    assert place_anywhere(yard(leader, follower, ranks=2), "m") == LoadTarget("leader.1", [1, 0])


def test_load_without_a_free_device_fails_with_a_hint() -> None:
    with pytest.raises(NoPlace, match="name a worker with --worker"):
        place_anywhere(yard(BUSY), "m")


def test_load_on_a_named_worker_displaces_its_busy_model() -> None:
    assert place_at(yard(BUSY), "m", "busy") == LoadTarget("busy.1")


@pytest.mark.parametrize(
    ("model", "one", "reason"),
    [
        ("m", worker("w", "ready", 0, run_state="PAUSED"), "w is PAUSED: unpause it first"),
        ("m", worker("w", "asleep", 0, run_state="SUSPENDED"), "resume and unpause it first"),
        ("k", worker("w", "warm", 0), "no live host may load 'k'"),
        ("m", worker("other", "warm", 0), "'w' is not live now"),
    ],
)
def test_a_load_on_an_unusable_worker_is_refused_with_the_reason(
    model: str, one: WorkerView, reason: str
) -> None:
    with pytest.raises(NoPlace, match=reason):
        place_at(yard(one), model, "w")


def test_a_load_on_a_wrong_host_names_the_hosts_of_the_model() -> None:
    stranger = WorkerInfo(name="w", state="warm", controller="elsewhere")
    with pytest.raises(NoPlace, match="these may: host"):
        place_at(yard(WorkerView("w.1", "warm", 0, 1000, stranger)), "m", "w")
