"""What does the board cost on a big yard?

1,000 workers, 100,000 waiting requests, 10,000 dead letters and 10,000 tenants on a real broker
with a real leader. Each page of the board is asked for again and again, and then left open.

    python -m benchmarks.board [--rounds 30] [--open-s 10] [--json] [--quick]
"""

from __future__ import annotations

import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import click
import psutil
import redis

from benchmarks.board.big_yard import Sizes, big_yard
from benchmarks.board.serving import Visitor, serving_board
from benchmarks.machine import machine
from benchmarks.measure import Latencies, cpu_seconds, print_table
from benchmarks.progress import publish, tell
from benchmarks.yard import embedded_broker, end_in_order
from tokenyard.protocol.keys import Keys

#: Targets: ms of a page, keys that it asks for, share of a core of the broker for an open page.
PAGE_MS: Final = 300.0
PAGE_KEYS: Final = 4_000
OPEN_PERCENT: Final = 1.0
QUICK: Final = Sizes(workers=20, waiting=2_000, dead=200, tenants=100, ended=50)
#: By path, by name.
Figures = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Asked:
    """The commands of one process, as MONITOR shows them, without those inside scripts."""

    commands: int
    keys: int  # in all commands together


class Watcher:
    """Counts what one process asks of a broker."""

    def __init__(self, url: str, pid: int) -> None:
        self._connection: Any = redis.Redis.from_url(url)
        self._process = psutil.Process(pid)

    def during(self, call: Callable[[], object], prefix: str) -> Asked:
        """What is asked in the course of a call; keys are the words that begin with ``prefix``."""
        end = secrets.token_hex(8)
        heard: list[dict[str, Any]] = []
        is_listening = threading.Event()

        def listen() -> None:
            with self._connection.monitor() as monitor:
                is_listening.set()
                for one in monitor.listen():
                    if end in one["command"]:
                        return
                    heard.append(one)

        thread = threading.Thread(target=listen)
        thread.start()
        is_listening.wait()
        call()
        ports = {str(one.laddr.port) for one in self._process.net_connections("tcp")}
        self._connection.echo(end)
        thread.join()
        ours = [one["command"] for one in heard if str(one["client_port"]) in ports]
        words = [word for command in ours for word in command.split()]
        return Asked(len(ours), sum(word.strip('"').startswith(prefix) for word in words))


def measure(sizes: Sizes, rounds: int, open_s: float) -> Figures:
    """The figures of each page."""
    with embedded_broker() as broker, big_yard(broker, sizes) as yards:
        prefix = Keys(yards.names[0]).leader.removesuffix("leader")
        with serving_board(yards.url, yards.names[0]) as (url, pid):
            visitor, watcher = Visitor(url), Watcher(yards.url, pid)
            found = {}
            for path in visitor.paths():
                tell(f"board: {path}")
                times = Latencies([_time_ms(visitor, path) for _ in range(rounds)])
                asked = watcher.during(partial(visitor.get, path), prefix)
                found[path] = {
                    "p50_ms": times.percentile(50),
                    "p99_ms": times.percentile(99),
                    "commands": asked.commands,
                    "keys": asked.keys,
                    "kib": len(visitor.get(path)) / 1024,
                    "open_percent": _open_percent(visitor, path, broker.pid, open_s),
                }
            return found


def _time_ms(visitor: Visitor, path: str) -> float:
    began = time.perf_counter()
    visitor.get(path)
    return 1000 * (time.perf_counter() - began)


def _open_percent(visitor: Visitor, path: str, pid: int, seconds: float) -> float:
    """What an open page adds to the broker, in percent of a core: closed, open, open, closed."""
    closed = [_percent(pid, seconds)]
    with visitor.looking(path):
        opened = [_percent(pid, seconds), _percent(pid, seconds)]
    closed.append(_percent(pid, seconds))
    return statistics.mean(opened) - statistics.mean(closed)


def _percent(pid: int, seconds: float) -> float:
    pids = {"broker": [pid]}
    before, began = cpu_seconds(pids)["broker"], time.perf_counter()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pids)["broker"] - before) / (time.perf_counter() - began)


def missed(figures: Figures, *, is_quick: bool = False) -> Iterator[str]:
    """Targets that were missed, in words; those of speed are not looked at in a short run."""
    for path, one in figures.items():
        if one["keys"] > PAGE_KEYS:
            yield f"{path}: asks for {one['keys']:,.0f} keys, not {PAGE_KEYS:,}"
        if one["p50_ms"] > PAGE_MS and not is_quick:
            yield f"{path}: {one['p50_ms']:.0f} ms, not {PAGE_MS:g}"
        if one["open_percent"] > OPEN_PERCENT and not is_quick:
            yield f"{path}: open, it takes {one['open_percent']:.1f} % of a core of the broker"


def show(figures: Figures) -> None:
    """Print the table: a page a row."""
    names = next(iter(figures.values()))
    rows = [(path, *one.values()) for path, one in figures.items()]
    print_table("the board on a big yard", ["page", *names], rows)


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=30, type=click.IntRange(2), help="Times each page is asked for.")
@click.option("--open-s", default=10.0, type=click.FloatRange(min=0.1), help="For one of 4 turns.")
@click.option("--quick", is_flag=True, help="A small yard for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(rounds: int, open_s: float, *, quick: bool, as_json: bool) -> None:
    """Measure each page of the board; the status is not 0 where a target is missed."""
    end_in_order()
    sizes, rounds, open_s = (QUICK, 5, 0.2) if quick else (Sizes(), rounds, open_s)
    found = measure(sizes, rounds, open_s)
    told = list(missed(found, is_quick=quick))

    def show_all() -> None:
        show(found)
        print(*(told or ["every target holds"]), machine(), sep="\n")

    publish({"pages": found, "missed": told}, show_all, as_json=as_json)
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
