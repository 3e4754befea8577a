"""`tokenyard top`, and `tokenyard info` again and again."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from tests.cli.running import Up, environment, tokenyard
from tests.support.builders import random_name
from tests.support.looks import make_look, make_view_worker
from tests.support.servers import Server, find_binary
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.admin.dead_letters import DeadLetter
from tokenyard.admin.history import Look, SnapshotHistory
from tokenyard.cli.shared.watching import watch
from tokenyard.cli.top.frame import Paper, frame, history
from tokenyard.process.program import Exit
from tokenyard.protocol.control import DesiredState, DesiredStates
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerTotals

Ask = Callable[..., Result]
PAUSED = DesiredState(run_state="PAUSED", by="kim@north", why="its driver")


def drawn(looks: SnapshotHistory, width: int = 80, height: int = 0, fault: str = "") -> str:
    console = Console(width=width, markup=False, highlight=False, record=True)
    with console.capture() as capture:
        console.print(frame(looks, "yard main at redis://x", Paper(width, height), fault))
    return capture.get()


def many(count: int) -> SnapshotHistory:
    """Two looks at a yard with some workers, where much went wrong."""
    looks = SnapshotHistory()
    letter = DeadLetter("5-0", 5000, "it killed its worker", "low/1-0", "ann", "q7", "", {})
    hosts = [HostInfo(name="gpu", models=[ModelInfo(name="big", fault="no file", faulted_ms=1)])]
    for second in (1, 2):
        tally = WorkerTotals(finished=second, tokens=7 * second, ttft_ms=12.0)
        workers = [
            make_view_worker(f"w-{n}.{n}", tally, lane=2, lane_limit=5, last_error="died\nthen")
            for n in range(count)
        ]
        looks.add(
            make_look(
                1000 * second,
                workers,
                waiting=4 * second,
                letters=[letter],
                hosts=hosts,
                desired_states=DesiredStates({"model:adder": PAUSED}),
            )
        )
    return looks


def test_a_picture_says_what_goes_on() -> None:
    text = drawn(many(2))

    for words in (
        "north (epoch 1",
        "2.0 requests/s, 14 tokens/s, 12 ms to the first token",
        "2 of 2 workers ready",
        "model adder PAUSED by kim@north: its driver",
        "w-1.1",
        "2/5",
        "dead letter: it killed its worker",
        "died then",
        "big: no file",
        "▄█",
    ):
        assert words in text, words


def test_a_long_reason_leaves_the_names_of_the_lines() -> None:
    looks = SnapshotHistory()
    long = DesiredState(run_state="PAUSED", by="kim@north", why="look at its driver " * 10)
    looks.add(make_look(1000, desired_states=DesiredStates({"all": long})))

    lines = drawn(looks, height=24).splitlines()

    for name in ("Leader north", "Rates  -", "Yard   0 of 0", "Paused all workers PAUSED by kim"):
        assert [line for line in lines if line.startswith(name)], name


@pytest.mark.parametrize("workers", [0, 1, 6, 200])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
@pytest.mark.parametrize("fault", ["", "Redis does not answer " * 20])
def test_a_picture_fits(workers: int, width: int, height: int, fault: str) -> None:
    lines = drawn(many(workers), width, height, fault).splitlines()

    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert any("Last errors" in line for line in lines)
    assert any("north" in line for line in lines)
    assert any("more" in line for line in lines) == (workers == 200)


def test_an_empty_yard_has_a_picture() -> None:
    looks = SnapshotHistory()
    looks.add(make_look(leader=None))

    text = drawn(looks, height=24)

    assert "nobody: nothing is dispatched" in text
    assert "0 of 0 workers ready" in text


def test_history_has_bars_for_whatever_waits() -> None:
    assert history([0, 1, 50, 100]) == " ▁▄█"
    assert history([0, 0]) == "  "


def test_a_broker_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    binary = find_binary("valkey")
    assert binary
    server = Server("valkey", binary, tmp_path)
    server.start()
    turns: Iterator[Callable[[], None]]
    turns = iter([server.kill, lambda: None, server.start, lambda: None])

    def pause() -> bool:
        next(turns)()
        return True

    try:
        seen = list(watch(server.url, "main", pause, count=5))
    finally:
        server.kill()

    kinds = [type(one) for one in seen]
    assert kinds == [Look, BrokerUnavailable, BrokerUnavailable, Look, Look]


def test_one_picture_of_a_yard_as_a_program(yard: dict[str, Any]) -> None:
    with Client(yard["url"]) as client:
        handle = client.submit("hello", max_tokens=40, stream=True)
        handle.result(timeout=30)
    shown = tokenyard("--redis-url", yard["url"], "top", "--once", "--interval", "0.5")

    assert shown.returncode == Exit.OK, shown.stderr
    assert "2 of 2 workers ready" in shown.stdout
    assert "tokens/s" in shown.stdout
    assert "simulated" in shown.stdout


def test_nobody_leads(ask: Ask) -> None:
    shown = ask("--yard", random_name("yard"), "top", "--once", "--interval", "0.1")

    assert shown.exit_code == Exit.UNAVAILABLE
    assert "nobody: nothing is dispatched" in shown.stdout


def test_what_is_no_terminal_gets_a_hint(ask: Ask) -> None:
    shown = ask("top")

    assert shown.exit_code == Exit.USAGE
    assert "--once" in shown.stderr


def test_it_takes_the_screen_and_gives_it_back_on_q(yard: dict[str, Any]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tokenyard", "--redis-url", yard["url"], "top"]
    env = environment(TERM="xterm", COLUMNS="80", LINES="24")
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        try:
            shown = b""
            while b"workers ready" not in shown:
                shown += os.read(ours, 65536)
            os.write(ours, b"q")
            while b"\x1b[?1049l" not in shown:
                shown += os.read(ours, 65536)
            assert process.wait(30) == Exit.OK
        finally:
            process.kill()
    os.close(ours)
    assert b"\x1b[?1049h" in shown


def test_info_again_and_again(ask: Ask) -> None:
    shown = ask("info", "--interval", "0.2", "--count", "3", "--json")
    first, *_, last = [json.loads(line) for line in shown.stdout.splitlines()]

    assert shown.exit_code == Exit.OK
    assert len(shown.stdout.splitlines()) == 3
    assert first["rates"] is None
    assert last["at_ms"] > first["at_ms"]
    assert last["rates"]["yard"].keys() == {"requests_per_s", "tokens_per_s"}
    assert last["rates"]["workers"].keys() == {each["worker"] for each in last["workers"]}


def test_info_prints_a_block_for_each_look(yard: dict[str, Any]) -> None:
    shown = tokenyard("--redis-url", yard["url"], "info", "--interval", "0.2", "--count", "2")

    assert shown.returncode == Exit.OK, shown.stderr
    assert shown.stdout.count("Dead letters") == 2
    assert shown.stdout.count("requests/s") == 1


def test_a_count_without_an_interval_is_wrong_usage(ask: Ask) -> None:
    assert ask("info", "--count", "2").exit_code == Exit.USAGE


def test_tokens_are_counted_once(start_up: Callable[..., Up], invoke: Ask) -> None:
    """What the workers say in the roster is what clients have got."""
    # Given a yard of its own: workers tell once a second, so what others asked may be told late
    url = str(start_up("--workers", "2").wait_ready()["url"])

    def counted() -> tuple[int, int]:
        workers = json.loads(invoke("--redis-url", url, "info", "--json").stdout)["workers"]
        tallies = [each["info"].get("tally", {}) for each in workers]
        sums = (sum(tally.get(name, 0) for tally in tallies) for name in ("finished", "tokens"))
        finished, tokens = sums
        return finished, tokens

    with Client(url) as client:
        prompts = [f"question {number}" for number in range(10)]
        got = [result for _, result in client.map(prompts, max_tokens=6, stream=True)]
        got += [result for _, result in client.map(prompts, max_tokens=6)]
    tokens = sum(len(result.tokens) for result in got)

    assert eventually(lambda: counted() == (20, tokens))


def test_why_a_worker_died_is_kept(start_up: Callable[..., Up], invoke: Ask) -> None:
    url = str(start_up("--workers", "1", "--grace-s", "1").wait_ready()["url"])

    def worker() -> dict[str, Any]:
        seen = json.loads(invoke("--redis-url", url, "info", "--json").stdout)["workers"]
        return seen[0]["info"] if len(seen) == 1 else {}

    first = worker()
    assert "last_error" not in first
    os.kill(first["pid"], signal.SIGKILL)

    # I expect its successor to say it
    assert eventually(lambda: worker().get("last_error") == "ended by SIGKILL", timeout_s=20.0)
    shown = invoke("--redis-url", url, "top", "--once", "--interval", "0.1")
    assert "ended by SIGKILL" in shown.stdout
    assert "ended by SIGKILL" in invoke("--redis-url", url, "doctor").stdout
