"""`tokenyard pause` and related commands: scopes, messages, and workers that do not obey."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cli.conftest import SLOW
from tests.cli.running import StartUp, said, tokenyard
from tests.support.builders import make_request, random_name
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard import Client
from tokenyard.process.program import Exit
from tokenyard.protocol.control import RUN_STATES, Acknowledgement
from tokenyard.protocol.worker_info import WorkerInfo, encode_worker

Run = Callable[..., Any]
LEASE_MS = 600_000


# Workers that the test plays


def join(quiet: PlayedYard, name: str, model: str = "", **more: Any) -> str:
    """Register a worker that does nothing by itself."""
    state = "ready" if model else "warm"
    info = WorkerInfo(name=name, state=state, model=model, **more)
    return quiet.scripts.register(name, LEASE_MS, encode_worker(info))


def told(quiet: PlayedYard, verb: str) -> set[str]:
    """The workers with a command."""
    entries = quiet.connection.xrange(quiet.keys.control)
    commands = [json.loads(fields[b"command"]) for _, fields in entries if b"command" in fields]
    return {each["worker"] for each in commands if each["verb"] == verb}


def signals(quiet: PlayedYard, signal: str) -> list[str]:
    """The ids of the entries of a signal."""
    entries = quiet.connection.xrange(quiet.keys.control)
    orders = [(entry.decode(), json.loads(fields[b"signal"])) for entry, fields in entries]
    return [entry for entry, order in orders if order["signal"] == signal]


@pytest.mark.long
def test_worker_without_an_answer_is_named(quiet: PlayedYard, run: Run) -> None:
    """Given two workers of which one obeys, I expect the other in the answer, and status 3."""
    lazy = join(quiet, "lazy")
    obeyed = said(run("pause", "--no-wait", "--json"))["ids"][0]
    join(quiet, "good", obeyed=obeyed)
    late = run("pause", "--timeout", "0")
    assert late.returncode == Exit.UNAVAILABLE
    assert late.stdout == "all workers: paused already\n"
    assert late.stderr == (
        f"Error: 1 worker has not obeyed after 0 s:\n  lazy ({lazy}): has not answered\n"
    )
    shown = run("pause", "--timeout", "0", "--json")
    assert shown.returncode == Exit.UNAVAILABLE
    assert json.loads(shown.stdout)["unacknowledged"] == [
        {"worker": lazy, "name": "lazy", "reason": ""}
    ]


@pytest.mark.long
def test_refusal_ends_the_wait(quiet: PlayedYard, run: Run) -> None:
    worker = join(quiet, "insomniac")
    run("pause", "--no-wait")
    with ThreadPoolExecutor(1) as pool:
        suspended = pool.submit(run, "suspend")
        signal = eventually(lambda: signals(quiet, "SUSPEND"), timeout_s=30)[0]
        answer = Acknowledgement(worker=worker, done=False, reason="its engine cannot sleep")
        quiet.scripts.acknowledge(signal, answer)
        refused = suspended.result()
    assert refused.returncode == Exit.UNAVAILABLE
    assert refused.stderr == (
        f"Error: 1 worker has not obeyed:\n  insomniac ({worker}): its engine cannot sleep\n"
    )


@pytest.mark.long
def test_redundant_signal_prints_one_line(quiet: PlayedYard, run: Run) -> None:
    """Given each signal twice, I expect the second to write no entry."""
    pairs = [
        (("pause",), "paused", "paused already"),
        (("suspend",), "suspended", "suspended already"),
        (("resume",), "awake, and paused", "not suspended"),
        (("unpause",), "unpaused", "not paused"),
        (("epoch", "4"), "in epoch 4", "in epoch 4 already"),
    ]
    for command, done, already in pairs:
        first, second = run(*command), run(*command)
        assert (first.returncode, first.stdout) == (Exit.OK, f"all workers: {done}\n"), first.stderr
        assert (second.returncode, second.stdout, second.stderr) == (
            Exit.OK,
            f"all workers: {already}\n",
            "",
        )
    assert quiet.connection.xlen(quiet.keys.control) == len(pairs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "command", "reason"),
    [
        ([], ("suspend",), "SUSPEND: all is RUNNING: PAUSE it first (tokenyard pause)"),
        (
            [("pause", "--worker", "w"), ("suspend", "--worker", "w")],
            ("unpause", "--worker", "w"),
            "RESUME it first (tokenyard resume --worker w)",
        ),
    ],
)
def test_an_invalid_signal_prints_the_way_to_it(
    quiet: PlayedYard,
    run: Run,
    before: list[tuple[str, ...]],
    command: tuple[str, ...],
    reason: str,
) -> None:
    join(quiet, "w")
    for each in before:
        assert run(*each, "--no-wait").returncode == Exit.OK
    done = run(*command)
    assert done.returncode == Exit.FAILED
    assert reason in done.stderr


@pytest.mark.long
def test_unpause_names_the_remaining_pauses(quiet: PlayedYard, run: Run) -> None:
    """Given a worker paused in all its scopes, I expect the other scopes to be named."""
    join(quiet, "gpu-0", "adder")
    join(quiet, "gpu-1", "subtractor")
    for scope in ((), ("--model", "adder"), ("--worker", "gpu-0"), ("--model", "subtractor")):
        why = () if scope else ("--why", "its driver")
        run("pause", "--no-wait", "--by", "kim@north", *why, *scope)
    run("suspend", "--no-wait", "--by", "kim@north", "--worker", "gpu-0")
    model = run("unpause", "--no-wait", "--model", "adder")
    still = model.stdout.splitlines()[1:]
    assert model.stdout.splitlines() == [
        "model adder: UNPAUSE is given",
        still[0],
        still[1],
    ]
    assert re.fullmatch(r"still PAUSED: all workers for \S+ s by kim@north: its driver", still[0])
    assert re.fullmatch(r"still SUSPENDED: worker gpu-0 for \S+ s by kim@north", still[1])
    everybody = said(run("unpause", "--no-wait", "--json"))
    assert everybody["others"] == {"model:subtractor": "PAUSED", "worker:gpu-0": "SUSPENDED"}


@pytest.mark.long
def test_every_view_shows_a_pause(quiet: PlayedYard, run: Run) -> None:
    """Given a request that waits for a pause, I expect its operator and reason in each command."""
    join(quiet, "gpu-0", "adder", pid=7)
    quiet.submit(make_request("held", client="ann", model="adder"))
    why = ("--why", "look at its driver")
    run("pause", "--no-wait", "--model", "adder", *why, env={"TOKENYARD_OPERATOR": "kim@north"})
    words = "model adder PAUSED for ", " by kim@north: look at its driver"
    for command in (
        ("info",),
        ("models", "list"),
        ("explain", "held"),
        ("requests",),
        ("top", "--once", "--interval", "0.1"),
    ):
        shown = run(*command).stdout
        assert all(each in shown for each in words), (command, shown)
    assert "waiting, PAUSED" in run("requests").stdout
    assert "model:adder is PAUSED for " in run("doctor").stdout
    pause = {"scope": "model:adder", "run_state": "PAUSED", "by": "kim@north"}
    pause["why"] = "look at its driver"
    [model] = json.loads(run("models", "list", "--json").stdout)["models"]
    explained = json.loads(run("explain", "held", "--json").stdout)
    [listed] = json.loads(run("requests", "--json").stdout)
    for found in (model, explained, listed):
        [told] = found["pauses"]
        assert pause.items() <= told.items()
        assert told["since_ms"] > 0
    desired_state = json.loads(run("info", "--json").stdout)["desired_states"]["by_scope"][
        "model:adder"
    ]
    assert (desired_state["by"], desired_state["why"]) == ("kim@north", "look at its driver")
    run("unpause", "--no-wait", "--model", "adder")
    assert "kim@north" not in run("info").stdout + run("explain", "held").stdout


@pytest.mark.long
def test_the_default_operator_is_user_and_host(quiet: PlayedYard, run: Run) -> None:
    run("pause", "--no-wait")
    shown = json.loads(run("info", "--json").stdout)["desired_states"]["by_scope"]["all"]["by"]
    assert shown == f"{getpass.getuser()}@{socket.gethostname()}"


@pytest.mark.long
def test_info_says_that_requests_wait_for_a_pause(quiet: PlayedYard, run: Run) -> None:
    join(quiet, "gpu-0", "adder")
    quiet.submit(make_request(model="adder"))
    assert "until the pause is over" not in run("info").stdout
    run("pause", "--no-wait")
    assert "1 normal, 0 low: until the pause is over" in run("info").stdout


@pytest.mark.long
def test_unknown_names_are_errors_with_suggestions(quiet: PlayedYard, run: Run) -> None:
    incarnation = join(quiet, "gpu-0", "adder")
    model = run("pause", "--model", "added")
    assert model.returncode == Exit.FAILED
    assert model.stderr == (
        "Error: there is no model 'added'; did you mean adder? Known models: adder\n"
    )
    worker = run("drain", "--worker", "tpu-9")
    assert worker.returncode == Exit.FAILED
    assert "there is no worker 'tpu-9'" in worker.stderr
    by_incarnation = said(run("pause", "--worker", incarnation, "--no-wait", "--json"))
    assert by_incarnation["scope"] == "worker:gpu-0"


@pytest.mark.long
def test_a_departed_worker_can_be_unpaused(quiet: PlayedYard, run: Run) -> None:
    worker = join(quiet, "gpu-0")
    run("pause", "--worker", "gpu-0", "--no-wait")
    quiet.scripts.retire(worker, "left")
    assert run("unpause", "--worker", "gpu-0").stdout == "worker gpu-0: unpaused\n"


@pytest.mark.parametrize("command", [("drain",), ("stop", "--all")])
def test_nobody_ends_all_workers_unasked(
    quiet: PlayedYard, run: Run, command: tuple[str, ...]
) -> None:
    join(quiet, "w")
    done = run(*command)
    assert done.returncode == Exit.USAGE
    assert f"{command[0].upper()} of all workers, 1 worker: their processes end" in done.stderr
    assert "give --yes" in done.stderr
    assert told(quiet, command[0]) == set()


@pytest.mark.long
def test_only_workers_in_scope_are_commanded_to_end(quiet: PlayedYard, run: Run) -> None:
    adder, other = join(quiet, "gpu-0", "adder"), join(quiet, "gpu-1", "subtractor")
    late = run("drain", "--model", "adder", "--timeout", "0")
    assert late.returncode == Exit.UNAVAILABLE
    assert f"gpu-0 ({adder}): has not answered" in late.stderr
    assert told(quiet, "drain") == {adder}
    quiet.scripts.retire(adder, "left")
    assert said(run("drain", "--yes", "--no-wait", "--json"))["workers"] == [other]
    quiet.scripts.retire(other, "left")
    assert run("drain", "--yes").stdout == "all workers: no worker is live\n"


# Running workers


@pytest.fixture
def live(yard: dict[str, Any]) -> Iterator[Run]:
    """A function that runs a command on the shared yard, whose workers run again at the end."""

    def run(*arguments: str) -> Any:
        return tokenyard("--redis-url", yard["url"], *arguments)

    yield run
    for command in ("resume", "unpause"):
        done = run(command)
        assert done.returncode == Exit.OK, done.stderr


def run_states(live: Run) -> set[str]:
    """The run states that the workers report."""
    workers = json.loads(live("info", "--json").stdout)["workers"]
    return {each["info"].get("run_state", RUN_STATES[0]) for each in workers if each["lease_ms"]}


@pytest.mark.long
def test_a_paused_yard_accepts_requests_and_answers_them_later(
    live: Run, yard: dict[str, Any]
) -> None:
    """Given a running stream, I expect it whole, and later requests answered after the pause."""
    with Client(yard["url"], client_id=random_name("client"), result_timeout_s=60) as client:
        stream = client.submit("a long story", max_tokens=100, stream=True)
        deltas = iter(stream)
        tokens = list(next(deltas).tokens)
        paused = live("pause", "--mode", "keep", "--why", "the test says so")
        assert (paused.returncode, paused.stdout) == (Exit.OK, "all workers: paused\n")
        assert run_states(live) == {"PAUSED"}
        waiting = client.submit("hello", max_tokens=2)
        unpaused = live("unpause")
        assert (unpaused.returncode, unpaused.stdout) == (Exit.OK, "all workers: unpaused\n")
        assert run_states(live) == {"RUNNING"}
        for delta in deltas:
            tokens += delta.tokens
        assert len(tokens) == 100
        assert stream.result().tokens == tokens
        assert len(waiting.result().tokens) == 2


@pytest.mark.long
@pytest.mark.parametrize("verb", ["drain", "stop"])
def test_up_ends_after_its_workers_have_ended(start_up: StartUp, verb: str) -> None:
    """Given a running request, I expect `drain` to finish it and `stop` to hand it back."""
    up = start_up("--slots", "2", env=SLOW)
    url = str(up.wait_ready()["url"])
    with Client(url, client_id="ann", result_timeout_s=60) as client:
        handle = client.submit("a story", max_tokens=200, stream=True)
        next(iter(handle))
        workers = json.loads(tokenyard("--redis-url", url, "info", "--json").stdout)["workers"]
        name = workers[0]["info"]["name"]
        one = tokenyard("--redis-url", url, verb, "--worker", name)
        assert (one.returncode, one.stdout) == (Exit.OK, f"worker {name}: ended\n"), one.stderr
        assert len(handle.result().tokens) == 200
    rest = tokenyard("--redis-url", url, verb, "--yes", "--no-wait")
    assert rest.returncode == Exit.OK, rest.stderr
    assert up.wait() == Exit.OK
    assert eventually(lambda: not up.process.poll())
