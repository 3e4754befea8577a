"""The raw limit: the same three hops through Redis with plain redis-py.

client -> intake -> router -> lane -> 2 workers -> replies -> client, each hop a pipelined XADD,
an XREADGROUP and XACK + XDEL. There is no ledger, fence, lease or check, so lost entries stay lost.
Every hop is a separate process, as in Tokenyard.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import redis

from benchmarks.measure import Latencies, Throughput, flowing, measure_throughput, paced

BATCH = 256
WORKERS = 2
#: Seconds within which processes start on a busy machine.
WAIT_S = 60
REPLY = b"\0" * 128  # 32 tokens
_spawn = multiprocessing.get_context("spawn")


class Names:
    """The keys of one run."""

    def __init__(self, run: str) -> None:
        self.intake = f"{{{run}}}:intake"
        self.lanes = [f"{{{run}}}:lane:{at}" for at in range(WORKERS)]
        self.replies = f"{{{run}}}:replies"


def _connect(url: str) -> redis.Redis:
    # On a busy machine the processes take longer to start than redis-py's five seconds.
    return redis.Redis.from_url(url, protocol=2, socket_timeout=2 * WAIT_S)


def _read_group(connection: redis.Redis, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    answer: Any = connection.xreadgroup("g", "c", {stream: ">"}, count=BATCH, block=200)
    return answer[0][1] if answer else []


def route(url: str, run: str) -> None:
    """Run the middle hop, which sends entries to the lanes in turn."""
    names, connection, turn = Names(run), _connect(url), 0
    while True:
        entries = _read_group(connection, names.intake)
        pipeline = connection.pipeline(transaction=False)
        for _, fields in entries:
            pipeline.xadd(names.lanes[turn % WORKERS], fields)  # type: ignore[arg-type]
            turn += 1
        _let_go(pipeline, names.intake, entries)


def work(url: str, run: str, at: int) -> None:
    """Run the last hop, which answers each entry with 32 tokens."""
    names, connection = Names(run), _connect(url)
    lane = names.lanes[at]
    while True:
        entries = _read_group(connection, lane)
        pipeline = connection.pipeline(transaction=False)
        for _, fields in entries:
            pipeline.xadd(names.replies, {"id": fields[b"id"], "tokens": REPLY})
        _let_go(pipeline, lane, entries)


def _let_go(pipeline: Any, stream: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
    if entries:
        ids = [entry for entry, _ in entries]
        pipeline.xack(stream, "g", *ids)
        pipeline.xdel(stream, *ids)
        pipeline.execute()


@contextmanager
def running(url: str, run: str) -> Iterator[Sequence[BaseProcess]]:
    """Run the router and the workers; yields their processes."""
    names, connection = Names(run), _connect(url)
    for stream in (names.intake, *names.lanes):
        connection.xgroup_create(stream, "g", id="0", mkstream=True)
    processes = [
        _spawn.Process(target=route, args=(url, run), daemon=True),
        *(_spawn.Process(target=work, args=(url, run, at), daemon=True) for at in range(WORKERS)),
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


class RawClient:
    """Sends requests and reads replies in batches."""

    def __init__(self, url: str, run: str) -> None:
        self._names = Names(run)
        self._connection = _connect(url)
        self._last = b"0"

    def send(self, ids: range, payload: bytes) -> None:
        """Submit one batch."""
        pipeline = self._connection.pipeline(transaction=False)
        for number in ids:
            pipeline.xadd(self._names.intake, {"id": number, "tokens": payload})
        pipeline.execute()

    def receive(self) -> list[int]:
        """Wait for new replies; returns the ids of their requests."""
        answer: Any = self._connection.xread(
            {self._names.replies: self._last}, BATCH, block=WAIT_S * 1000
        )
        if not answer:
            raise TimeoutError(f"raw hops: no reply within {WAIT_S} s")
        entries = answer[0][1]
        self._last = entries[-1][0]
        return [int(fields[b"id"]) for _, fields in entries]


def throughput(
    url: str, run: str, requests: int, payload: bytes, window: int, broker_pid: int
) -> Throughput:
    """Requests per second with at most ``window`` under way."""
    with running(url, run) as (router, *workers):
        client = RawClient(url, run)
        client.send(range(1), payload)
        client.receive()  # all processes are up

        def ask() -> int:
            sent = done = 0
            while done < requests:
                while sent < requests and sent - done < window:
                    batch = min(BATCH, requests - sent)
                    client.send(range(sent, sent + batch), payload)
                    sent += batch
                done += len(client.receive())
            return done

        pids = {
            "client": [os.getpid()],
            "router": [router.pid or 0],
            "workers": [worker.pid or 0 for worker in workers],
            "broker": [broker_pid],
        }
        return measure_throughput(pids, ask)


def flow(url: str, run: str, requests: int, payload: bytes, rate: float) -> Latencies:
    """Time from submission to reply at a fixed rate, without waiting for replies."""
    with running(url, run):
        sender, receiver = RawClient(url, run), RawClient(url, run)
        sender.send(range(1), payload)
        receiver.receive()
        return flowing(requests, rate, lambda batch: sender.send(batch, payload), receiver.receive)


def latency(url: str, run: str, requests: int, payload: bytes, rate: float) -> Latencies:
    """Time from submission to reply at a fixed rate, one request at a time."""
    with running(url, run):
        client = RawClient(url, run)
        client.send(range(1), payload)
        client.receive()

        def ask(number: int) -> None:
            client.send(range(number, number + 1), payload)
            client.receive()

        return paced(requests, rate, ask)
