"""Yards for `benchmarks.scale`: coordinators, and one process that plays all workers."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from benchmarks.broker import Checked, prompts
from benchmarks.measure import Throughput
from benchmarks.scale.fleet import answer
from benchmarks.yard import START_TIMEOUT_S, running_programs, wait_until
from tokenyard import Client
from tokenyard.process.embedded_broker import EmbeddedBroker
from tokenyard.protocol.wire import pack_tokens, unpack_tokens

#: Queue limits beyond the backlog of any part.
_ROOM: Final = ("--max-num-queued-reqs", "3000000", "--max-num-queued-tokens", "1000000000")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of each yard: their number, places, and results per step."""

    workers: int = 2
    max_num_seqs: int = 256
    step: int = 1


@dataclass(frozen=True, slots=True)
class Yards:
    """Yards on one broker, each with its own coordinator and workers."""

    url: str
    names: Sequence[str]
    coordinators: Sequence[int]
    fleet: int
    broker: int
    is_well: Callable[[], bool]  # raises `ChildProcessError` with the log of an ended process

    @property
    def pids(self) -> dict[str, list[int]]:
        """Process ids of the services, by name."""
        return {"coordinator": list(self.coordinators), "broker": [self.broker]}

    def rest(self) -> None:
        """Stop the workers from taking requests."""
        os.kill(self.fleet, signal.SIGUSR1)

    def work(self) -> None:
        """Let the workers take requests again."""
        os.kill(self.fleet, signal.SIGUSR2)


@contextmanager
def scale_yards(broker: EmbeddedBroker, fleet: Fleet, count: int = 1) -> Iterator[Yards]:
    """Run ``count`` new yards; yields them once all their workers are in the roster."""
    names = [f"scale-{secrets.token_hex(4)}" for _ in range(count)]
    counts = map(str, (fleet.workers, fleet.max_num_seqs, fleet.step))
    programs = {
        name: ["coordinator", "--redis-url", broker.url, "--yard", name, *_ROOM] for name in names
    }
    programs["fleet"] = ["benchmarks.scale.fleet", broker.url, *counts, *names]
    with running_programs(programs) as watch:
        for name in names:
            wait_until(
                broker.url,
                name,
                lambda view: (
                    watch.is_well()
                    and view.leader is not None
                    and view.ready_workers >= fleet.workers
                ),
                START_TIMEOUT_S,
            )
        coordinators = [watch.pids[name] for name in names]
        yield Yards(broker.url, names, coordinators, watch.pids["fleet"], broker.pid, watch.is_well)
        watch.is_well()


def answers() -> list[list[int]]:
    """The fleet's answers to all prompts."""
    return [unpack_tokens(answer(pack_tokens(one))) for one in prompts()]


def asker(client: Client) -> Checked:
    """Sends requests to a yard and checks each answer."""
    return Checked(client, answers())


def costs_us(load: Throughput, idle_s: Mapping[str, float]) -> dict[str, float]:
    """CPU time per request of each process in µs, without its idle cost per second.

    Otherwise a request on a slow machine pays for more of the concurrent leases and polls.
    """
    return {
        name: 1e6 * max(0.0, load.cpu_s[name] - idle_s[name] * load.seconds) / load.requests
        for name in idle_s
    }
