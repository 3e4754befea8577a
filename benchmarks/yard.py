"""A whole yard for a benchmark: embedded broker, coordinator, one controller with its workers."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tokenyard import Client
from tokenyard.broker import EmbeddedBroker
from tokenyard.tether import start_tethered, stop_tethered

START_TIMEOUT_S = 120.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Yard:
    """A yard that serves."""

    url: str
    name: str
    pids: Mapping[str, Sequence[int]]

    def missing(self) -> int:
        """How many of its processes are gone, also where another has taken the place."""
        return sum(not psutil.pid_exists(pid) for group in self.pids.values() for pid in group)


@contextmanager
def embedded_broker() -> Iterator[EmbeddedBroker]:
    """Valkey with an append-only file, written every second."""
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        broker = EmbeddedBroker(Path(folder))
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


@contextmanager
def simulated_yard(
    broker: EmbeddedBroker,
    name: str,
    workers: int,
    max_num_seqs: int,
    coordinator_options: Sequence[str] = (),
) -> Iterator[Yard]:
    """A coordinator and simulated workers of unlimited speed."""
    shared = ["--redis-url", broker.url, "--yard", name]
    worker = ["--engine", "simulated", "--slots", str(workers), "--max-num-seqs", str(max_num_seqs)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenyard-bench-")))
        pids = {}
        for program, options in (
            ("coordinator", ["--expect-workers", str(workers), *coordinator_options]),
            ("worker", worker),
        ):
            command = [sys.executable, "-m", program, *shared, *options]
            process = start_tethered(command, folder / f"{program}.log")
            stack.callback(stop_tethered, process, STOP_S)
            pids[program] = process.pid
        _wait_for_workers(broker.url, name, workers)
        children = [child.pid for child in psutil.Process(pids["worker"]).children(recursive=True)]
        yield Yard(
            broker.url,
            name,
            {
                "client": [os.getpid()],
                "coordinator": [pids["coordinator"]],
                "workers": [pids["worker"], *children],
                "broker": [broker.pid],
            },
        )


def _wait_for_workers(url: str, name: str, count: int) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    with Client(url, yard=name, connect_timeout_s=START_TIMEOUT_S) as client:
        while len(client.info().workers) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"not all {count} workers came up in {START_TIMEOUT_S:g} s")
            time.sleep(0.05)
