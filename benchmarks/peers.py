"""How do others perform on the same job? Job queues on Redis, and an in-memory coordinator.

The job: 128 prompt tokens in, 32 result tokens out, two workers, one client that collects every
result. The peers: RQ, Celery, arq, streaQ, taskiq and dramatiq, each in its own virtual environment
with the best settings in its documentation, on the same broker as Tokenyard; and an in-memory
coordinator (ZMQ, msgpack) modelled on Megatron Core's. All take turns in one run.

    python -m benchmarks.peers [--json] [--quick] [--peers rq,zmq]
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import redis

from benchmarks.broker import RATE, WINDOW, WORKERS, Checked
from benchmarks.measure import paced, print_table
from benchmarks.progress import publish
from benchmarks.yard import ServingYard, embedded_broker, end_in_order, simulated_yard
from tokenyard import Client
from tokenyard.process.children import start_child, stop_child
from tokenyard.process.embedded_broker import EmbeddedBroker

PROGRAMS: Final = Path(__file__).parent / "peer_programs"
ENVIRONMENTS: Final = Path(__file__).parent.parent / ".tox" / "peers"
IN_MEMORY: Final = "zmq"
INSTALL_S: Final = 300.0
CLIENT_S: Final = 600.0
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A library or program that Tokenyard is compared with."""

    name: str
    requests: int  # per throughput measurement: enough to take some seconds

    @property
    def program(self) -> Path:
        """The program with its worker and its client."""
        return PROGRAMS / f"{self.name}_peer.py"

    @property
    def version(self) -> str:
        """The pinned version of the library."""
        pins = dict(
            line.partition("==")[::2] for line in self.requirements.read_text().splitlines()
        )
        return pins.get(self.name) or pins["pyzmq"]

    @property
    def requirements(self) -> Path:
        """The pinned packages of its environment."""
        return PROGRAMS / f"{self.name}.txt"


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("rq", 2_000),
        Peer("celery", 2_000),
        Peer("arq", 2_000),
        Peer("streaq", 2_000),
        Peer("taskiq", 2_000),
        Peer("dramatiq", 2_000),
        Peer(IN_MEMORY, 20_000),
    )
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One measurement."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float


def interpreter(peer: Peer) -> str:
    """The Python of the peer's environment, which is created if missing or out of date."""
    folder = ENVIRONMENTS / peer.name
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    wanted = peer.requirements.read_text()
    if not done.exists() or done.read_text() != wanted:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)],
            [*pip, "--no-deps", "--disable-pip-version-check", "-r", str(peer.requirements)],
        ):
            subprocess.run(command, check=True, timeout=INSTALL_S, stdout=sys.stderr)
        done.write_text(wanted)
    return str(python)


@contextmanager
def serving(peer: Peer, url: str) -> Iterator[dict[str, str]]:
    """Run the peer's workers and any coordinator; yields their environment variables."""
    environment = {**os.environ, "PEER_URL": url, "PYTHONPATH": str(PROGRAMS)}
    roles = ["worker"] * WORKERS
    if peer.name == IN_MEMORY:
        roles.insert(0, "coordinator")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenyard-bench-")))
        for number, role in enumerate(roles):
            command = [interpreter(peer), str(peer.program), role, url]
            log = folder / f"{number}-{role}.log"
            process = start_child(command, log, env=environment)
            stack.callback(stop_child, process, _STOP_S)
        yield environment


def measure_peer(peer: Peer, url: str, requests: int) -> Figures:
    """Measure a peer; raises `ChildProcessError` with its last output if it fails."""
    with serving(peer, url) as environment:
        done = subprocess.run(
            [interpreter(peer), str(peer.program), "client", url, str(requests), str(RATE)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
    if done.returncode:
        raise ChildProcessError(f"{peer.name}: {done.stderr[-2000:]}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def measure_yard(yard: ServingYard, requests: int) -> Figures:
    """Measure Tokenyard in the same way."""
    with Client(yard.url, yard=yard.name) as client:
        checked = Checked(client)
        checked.many(min(requests, 2000))
        began = time.perf_counter()
        checked.many(requests)
        per_s = requests / (time.perf_counter() - began)
        times = paced(min(200, requests // 10), RATE, checked.one)
        return Figures(per_s, times.percentile(50), times.percentile(99))


def measure_all(
    broker: EmbeddedBroker, yard: ServingYard, peers: Sequence[Peer], requests: int, scale: float
) -> dict[str, Figures]:
    """Measure each side once."""
    found = {"tokenyard": measure_yard(yard, requests)}
    for peer in peers:
        with own_database(broker) as url:
            target = f"ipc://{tempfile.gettempdir()}/tokenyard-{secrets.token_hex(4)}"
            at = target if peer.name == IN_MEMORY else url
            found[peer.name] = measure_peer(peer, at, max(100, int(peer.requests * scale)))
    return found


@contextmanager
def own_database(broker: EmbeddedBroker) -> Iterator[str]:
    """Another database of the same broker, empty before and after use."""
    url = f"{broker.url.rpartition('/')[0]}/9"
    with redis.Redis.from_url(url, socket_timeout=10.0) as connection:
        connection.flushdb()
        yield url
        connection.flushdb()


def summary(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, dict[str, float]]:
    """Medians by name, and the ratio of Tokenyard's throughput to each peer's."""
    found = {}
    for name in rounds[0]:
        ratios = [one["tokenyard"].requests_per_s / one[name].requests_per_s for one in rounds]
        found[name] = {
            "requests_per_s": statistics.median(one[name].requests_per_s for one in rounds),
            "p50_ms": statistics.median(one[name].p50_ms for one in rounds),
            "p99_ms": statistics.median(one[name].p99_ms for one in rounds),
            "tokenyard_ratio": statistics.median(ratios),
        }
    return found


def show(figures: Mapping[str, Mapping[str, float]], rounds: int) -> None:
    """Print the figures as a table."""
    print_table(
        f"128 tokens in, 32 out, {WORKERS} workers, results collected; medians of {rounds}",
        ("", "requests/s", "p50 ms", "p99 ms", "Tokenyard is so many times as fast"),
        [
            (
                f"{name} {PEERS[name].version}" if name in PEERS else name,
                one["requests_per_s"],
                one["p50_ms"],
                one["p99_ms"],
                one["tokenyard_ratio"],
            )
            for name, one in figures.items()
        ],
    )


def _chosen(_: click.Context, __: click.Parameter, value: str) -> list[Peer]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = sorted(set(names) - PEERS.keys())
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: known are {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


@click.command(context_settings={"show_default": True})
@click.option("--requests", default=20_000, help="Tokenyard's of one throughput measurement.")
@click.option("--rounds", default=3, help="Measurements of each, in turn; medians are shown.")
@click.option("--peers", default=",".join(PEERS), callback=_chosen, help="Which, by name.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(requests: int, rounds: int, peers: list[Peer], quick: bool, as_json: bool) -> None:
    """Measure Tokenyard and its peers on the same job."""
    end_in_order()
    scale = 1.0
    if quick:
        requests, rounds, scale = 2_000, 1, 0.1
    for peer in peers:
        interpreter(peer)
    with (
        embedded_broker() as broker,
        simulated_yard(broker, "bench", WORKERS, max_num_seqs=WINDOW) as yard,
    ):
        measured = [measure_all(broker, yard, peers, requests, scale) for _ in range(rounds)]
    figures = summary(measured)
    publish(figures, lambda: show(figures, rounds), as_json=as_json)


if __name__ == "__main__":
    main()
