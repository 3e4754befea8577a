"""`tokenyard top` and `tokenyard info`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions

from tests.cli.running import Ask, StartUp, in_terminal, read_until, tokenyard
from tests.support.servers import Server
from tests.support.snapshots import make_letter, make_snapshot, make_view_worker
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.cli.info import watch
from tokenyard.cli.top.frame import bars, frame
from tokenyard.process.program import Exit
from tokenyard.protocol.control import DesiredState, DesiredStates
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerTotals
from tokenyard.yard.history import Snapshot, SnapshotHistory
from tokenyard.yard.line import InLine, TenantLine

PAUSED = DesiredState(run_state="PAUSED", by="kim@north", why="its driver")


def drawn(history: SnapshotHistory, width: int = 80, height: int = 0, fault: str = "") -> str:
    console = Console(width=width, markup=False, highlight=False, record=True)
    with console.capture() as capture:
        paper = ConsoleDimensions(width, height)
        console.print(frame(history, "yard main at redis://x", paper, fault))
    return capture.get()


def many(count: int) -> SnapshotHistory:
    """Two snapshots of a yard with some workers and many errors."""
    history = SnapshotHistory()
    letter = make_letter("5-0", "it killed its worker")
    hosts = [HostInfo(name="gpu", models=[ModelInfo(name="big", fault="no file", faulted_ms=1)])]
    for second in (1, 2):
        tally = WorkerTotals(finished=second, tokens=7 * second, ttft_ms=12.0)
        workers = [
            make_view_worker(f"w-{n}.{n}", tally, lane=2, lane_limit=5, last_error="died\nthen")
            for n in range(count)
        ]
        history.add(
            make_snapshot(
                1000 * second,
                workers,
                waiting=4 * second,
                letters=[letter],
                hosts=hosts,
                desired_states=DesiredStates({"model:adder": PAUSED}),
            )
        )
    return history


def test_frame_shows_the_state_of_the_yard() -> None:
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


def test_a_long_reason_hides_no_line() -> None:
    history = SnapshotHistory()
    long = DesiredState(run_state="PAUSED", by="kim@north", why="look at its driver " * 10)
    history.add(make_snapshot(1000, desired_states=DesiredStates({"all": long})))

    lines = drawn(history, height=24).splitlines()

    for name in (
        "Leader north",
        "Rates  -",
        "Yard   0 of 0",
        "Paused all workers PAUSED by kim",
    ):
        assert [line for line in lines if line.startswith(name)], name


@pytest.mark.parametrize("workers", [0, 1, 6, 200])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
@pytest.mark.parametrize("fault", ["", "Redis does not answer " * 20])
def test_frame_fits_the_terminal(workers: int, width: int, height: int, fault: str) -> None:
    lines = drawn(many(workers), width, height, fault).splitlines()

    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert any("Last errors" in line for line in lines)
    assert any("north" in line for line in lines)
    assert any("more" in line for line in lines) == (workers == 200)


@pytest.mark.parametrize("tenants", [0, 3, 40])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30)])
def test_frame_with_tenants_fits_the_terminal(tenants: int, width: int, height: int) -> None:
    history = SnapshotHistory()
    line = [InLine(f"t{n}" + "x" * 80 * (n == 1), 7, 2, 0.0, 0.0) for n in range(tenants)]
    for second in (1, 2):
        had = [dataclasses.replace(one, had=10.0 * second) for one in line]
        snapshot = make_snapshot(1000 * second, [make_view_worker("w.1")])
        seen = TenantLine(had, 7 * tenants)
        history.add(dataclasses.replace(snapshot, line=seen))
    lines = drawn(history, width, height).splitlines()

    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert sum(line.startswith("t") for line in lines) - 1 == {0: 0, 3: 3, 40: 4}[tenants]
    assert any(line.startswith("and 36 more") for line in lines) == (tenants == 40)
    assert not tenants or [part for part in lines if part.startswith("t0") and "%" in part]


def test_frame_of_an_empty_yard_reports_the_missing_leader() -> None:
    history = SnapshotHistory()
    history.add(make_snapshot(leader=None))

    text = drawn(history, height=24)

    assert "none: nothing is dispatched" in text
    assert "0 of 0 workers ready" in text


def test_bars_show_every_waiting_request() -> None:
    assert bars([0, 1, 50, 100]) == " ▁▄█"
    assert bars([0, 0]) == "  "


def test_watching_continues_when_the_broker_returns(new_server: Callable[..., Server]) -> None:
    server = new_server("valkey", aof=False)
    turns: Iterator[Callable[[], None]]
    turns = iter([server.kill, lambda: None, server.start, lambda: None])

    def pause() -> None:
        next(turns)()

    seen = list(watch(server.url, "main", pause, count=5))

    kinds = [type(one) for one in seen]
    assert kinds == [Snapshot, BrokerUnavailable, BrokerUnavailable, Snapshot, Snapshot]


@pytest.mark.long
def test_top_once_prints_one_frame(yard: dict[str, Any]) -> None:
    with Client(yard["url"]) as client:
        handle = client.submit("hello", max_tokens=40, stream=True)
        handle.result(timeout=30)
    shown = tokenyard("--redis-url", yard["url"], "top", "--once", "--interval", "0.5")

    assert shown.returncode == Exit.OK, shown.stderr
    assert "2 of 2 workers ready" in shown.stdout
    assert "tokens/s" in shown.stdout
    assert "simulated" in shown.stdout


@pytest.mark.long
def test_top_restores_the_screen_on_q(yard: dict[str, Any]) -> None:
    with in_terminal("--redis-url", yard["url"], "top", COLUMNS="80", LINES="24") as (process, at):
        shown = read_until(at, b"workers ready")
        os.write(at, b"q")
        read_until(at, b"\x1b[?1049l")
        assert process.wait(30) == Exit.OK
    assert b"\x1b[?1049h" in shown


def test_info_is_printed_as_json(ask: Ask, yard: dict[str, Any]) -> None:
    result = ask("info", "--json")
    assert result.exit_code == Exit.OK, result.output
    view = json.loads(result.stdout)
    assert view["yard"] == "main"
    assert view["models"] == {"simulated": 2}
    assert {worker["state"] for worker in view["workers"]} == {"ready"}
    assert view["handshake"]["protocol"] == "1"


def test_info_names_every_worker(ask: Ask) -> None:
    workers = [each["worker"] for each in json.loads(ask("info", "--json").stdout)["workers"]]
    table = ask("info").stdout
    assert all(worker in table for worker in workers)
    assert "simulated (2 workers)" in table


def test_info_with_an_interval_prints_rates(ask: Ask) -> None:
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


@pytest.mark.long
def test_tokens_are_counted_once(start_up: StartUp, invoke: Ask) -> None:
    """The roster's tallies equal the tokens that clients received."""
    # Given a new yard: workers report once a second, so a shared one may report late
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


@pytest.mark.long
def test_the_successor_of_a_dead_worker_shows_its_error(start_up: StartUp, invoke: Ask) -> None:
    url = str(start_up("--workers", "1", "--grace-s", "1").wait_ready()["url"])

    def worker() -> dict[str, Any]:
        seen = json.loads(invoke("--redis-url", url, "info", "--json").stdout)["workers"]
        return seen[0]["info"] if len(seen) == 1 else {}

    first = worker()
    assert "last_error" not in first
    os.kill(first["pid"], signal.SIGKILL)

    # I expect its successor to show the reason
    assert eventually(lambda: worker().get("last_error") == "ended by SIGKILL", timeout_s=60.0)
    shown = invoke("--redis-url", url, "top", "--once", "--interval", "0.1")
    assert "ended by SIGKILL" in shown.stdout
    assert "ended by SIGKILL" in invoke("--redis-url", url, "doctor").stdout
