"""What does a submission cost that waits for the disk or for a replica?

Measures each level of ``durability`` with one replica, on a server that syncs its file every second
and on one that syncs it before each reply. Every answer is checked.

    python -m benchmarks.durability [--singles 40] [--bursts 20] [--rounds 3] [--quick] [--json]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import click
import redis

from benchmarks.broker import expected, prompts
from benchmarks.machine import machine
from benchmarks.measure import print_table
from benchmarks.progress import publish
from benchmarks.yard import embedded_broker, end_in_order, simulated_yard
from tokenyard import Client, Handle
from tokenyard.client.options import LEVELS, Durability
from tokenyard.process.embedded_broker import EmbeddedBroker

Fsync = Literal["everysec", "always"]
Case = tuple[Fsync, Durability]

FSYNCS: Final[tuple[Fsync, ...]] = get_args(Fsync)
CASES: Final[tuple[Case, ...]] = tuple((fsync, level) for fsync in FSYNCS for level in LEVELS)
BURST: Final = 100
TOKENS: Final = 8
WORKERS: Final = 2
PATIENCE_S: Final = 60.0
#: The measures, by the suffix of their names in `--json`.
WHAT: Final = {"p50_ms": "p50 ms of one", "per_s": "submits/s in bursts"}
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of a case."""

    single_s: Sequence[float]  # per submission of one request
    burst_s: Sequence[float]  # per submission of `BURST` requests


def figures(samples: Mapping[Case, Sequence[Sample]]) -> dict[str, float]:
    """Medians over the rounds by case: ms per single submission, and submissions/s in bursts."""
    found: dict[str, float] = {}
    for (fsync, level), rounds in samples.items():
        p50_ms = [1000 * statistics.median(one.single_s) for one in rounds]
        per_s = [BURST * len(one.burst_s) / sum(one.burst_s) for one in rounds]
        found[f"{fsync}_{level}_p50_ms"] = round(statistics.median(p50_ms), 3)
        found[f"{fsync}_{level}_per_s"] = round(statistics.median(per_s), 1)
    return found


class Submitter:
    """Times submissions and checks every answer."""

    def __init__(self, client: Client, level: Durability) -> None:
        self._client = client
        self._level = level
        self._prompt = prompts()[0]
        self._answer = expected(self._prompt)[:TOKENS]

    def sample(self, singles: int, bursts: int) -> Sample:
        """Time submissions of one request, then of many; each follows the previous answers."""
        return Sample(
            [self._timed(1) for _ in range(singles)], [self._timed(BURST) for _ in range(bursts)]
        )

    def _timed(self, count: int) -> float:
        asked = [self._prompt] * count
        began = time.perf_counter()
        handles = self._client.submit_many(asked, max_tokens=TOKENS, durability=self._level)
        seconds = time.perf_counter() - began
        self._check(handles, count)
        return seconds

    def _check(self, handles: Sequence[Handle], count: int) -> None:
        if len(handles) != count:
            sys.exit(f"{len(handles)} of {count} requests were accepted")
        for handle in handles:
            tokens = handle.result(PATIENCE_S).tokens
            if tokens != self._answer:
                sys.exit(f"request {handle.id}: wrong answer {tokens}")


@contextmanager
def replica_of(broker: EmbeddedBroker) -> Iterator[None]:
    """Run a replica of this server."""
    port = broker.url.rpartition(":")[2].partition("/")[0]
    with (
        tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder,
        EmbeddedBroker(Path(folder)) as replica,
        redis.Redis.from_url(replica.url, socket_timeout=10.0) as connection,
    ):
        connection.replicaof("127.0.0.1", port)
        until = time.monotonic() + PATIENCE_S
        while connection.info("replication")["master_link_status"] != "up":
            if time.monotonic() > until:
                sys.exit("the replica does not reach its master")
            time.sleep(_POLL_S)
        yield


def measure(singles: int, bursts: int, rounds: int) -> dict[Case, list[Sample]]:
    """Measure all cases in each round, on one yard."""
    samples: dict[Case, list[Sample]] = {case: [] for case in CASES}
    with (
        embedded_broker() as broker,
        replica_of(broker),
        simulated_yard(broker, "bench", WORKERS, max_num_seqs=BURST) as yard,
        redis.Redis.from_url(yard.url, socket_timeout=10.0) as connection,
        Client(yard.url, yard=yard.name) as client,
    ):
        Submitter(client, "memory").sample(1, 10)  # warm-up
        for _ in range(rounds):
            for fsync, level in CASES:
                connection.config_set("appendfsync", fsync)
                sample = Submitter(client, level).sample(singles, bursts)
                samples[fsync, level].append(sample)
    return samples


def show(found: Mapping[str, float], singles: int, bursts: int, rounds: int) -> None:
    """Print the figures as a table."""
    rows = [
        (level, *(found[f"{fsync}_{level}_{what}"] for fsync in FSYNCS for what in WHAT))
        for level in LEVELS
    ]
    columns = [f"{fsync}: {words}" for fsync in FSYNCS for words in WHAT.values()]
    title = f"{singles} singles, {bursts} bursts of {BURST}, one replica; medians of {rounds}"
    print_table(title, ["durability", *columns], rows)
    print(machine())


@click.command(context_settings={"show_default": True})
@click.option("--singles", default=40, help="Submissions of one request, for each case.")
@click.option("--bursts", default=20, help=f"Submissions of {BURST} requests, for each case.")
@click.option("--rounds", default=3, help="Measurements of each case, in turn; medians are shown.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(singles: int, bursts: int, rounds: int, quick: bool, as_json: bool) -> None:
    """Measure what each level of durability costs a submission."""
    end_in_order()
    if quick:
        singles, bursts, rounds = 3, 2, 1
    found = figures(measure(singles, bursts, rounds))
    publish(found, lambda: show(found, singles, bursts, rounds), as_json=as_json)


if __name__ == "__main__":
    main()
