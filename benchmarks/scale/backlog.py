"""Measures the cost of waiting requests, to themselves and to others; see `benchmarks.scale`.

Two brokers take turns: one whose yard is empty except for the measured requests, and one with a
growing backlog.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from benchmarks.broker import PROMPTS, prompts
from benchmarks.measure import Latencies, Throughput, measure_throughput
from benchmarks.progress import tell
from benchmarks.scale.fleet import answer
from benchmarks.scale.yard import Fleet, Yards, scale_yards
from benchmarks.yard import ServerName, embedded_broker
from tokenyard import Client
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.replies import decode_replies
from tokenyard.protocol.wire import Request, SamplingParams, pack_tokens
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Submitted

#: Requests per burst of submissions, as in the client.
_BURST: Final = 256
_POLL_S: Final = 0.005
#: Longest wait for an answer, in seconds.
_PATIENCE_S: Final = 120.0
_SUBMIT_RATE: Final = 100.0


class Side:
    """A yard whose workers rest, and its backlog."""

    def __init__(self, yards: Yards, tenants: int = 0) -> None:
        """``tenants`` have as many requests each; 0: requests have none."""
        self._yards = yards
        self._tenants = [f"tenant-{number:05d}" for number in range(tenants)] or [""]
        self._turns = itertools.cycle(self._tenants)
        self._connection: Any = open_connection(yards.url)
        # Only `memory` rewrites the file. By itself, the server would rewrite the empty yard's
        # small file during a measurement, but not the deep yard's large one.
        self._connection.config_set("auto-aof-rewrite-percentage", 0)
        self._keys = Keys(yards.names[0])
        self._scripts = Scripts(Yard(self._connection, self._keys))
        self._payloads = [pack_tokens(one) for one in prompts()]
        self._client = f"client-{secrets.token_hex(8)}"
        self._run = secrets.token_hex(6)
        self._count = 0
        workers: list[Any] = self._connection.zrange(self._keys.leases, 0, -1)
        lanes = [self._keys.lane(worker.decode()) for worker in workers]
        self._streams = [self._keys.intake("normal"), *lanes]
        yards.rest()

    @property
    def waiting(self) -> int:
        """Requests in the intake and on the lanes."""
        # One transaction: a request that moves from the intake to a lane must not count twice.
        pipeline = self._connection.pipeline(transaction=True)
        pipeline.hget(self._keys.tally, "tenants_waiting")
        for stream in self._streams:
            pipeline.xlen(stream)
        of_tenants, *lengths = pipeline.execute()
        return sum(map(int, [of_tenants or 0, *lengths]))

    def fill(self, waiting: int) -> None:
        """Submit until ``waiting`` requests wait."""
        each = max(1, (waiting - self.waiting) // len(self._tenants))
        while (left := waiting - self.waiting) > 0:
            burst = self._requests(next(self._turns))
            requests = list(itertools.islice(burst, min(left, each, _BURST)))
            accepted = self._scripts.submit("normal", requests)
            if any(one.code is not Submitted.ACCEPTED for one in accepted):
                sys.exit(f"a request was not accepted: {accepted}")

    def _requests(self, tenant: str) -> Iterator[Request]:
        params = SamplingParams(max_tokens=32)
        while True:
            number, self._count = self._count, self._count + 1
            yield Request(
                id=f"{self._run}-{number}",
                client=self._client,
                reply_to=f"replies:{self._client}",
                tokens=self._payloads[number % PROMPTS],
                params=params,
                tenant=tenant,
            )

    @property
    def payload_bytes(self) -> int:
        """Bytes of one request's tokens and id."""
        return len(self._payloads[0]) + len(f"{self._run}-{self._count}")

    def memory(self) -> int:
        """Bytes that the broker uses, without buffers."""
        self._settle()
        told: dict[str, int] = self._connection.info("memory")
        return told["used_memory"] - told["mem_clients_normal"] - told["mem_aof_buffer"]

    def _settle(self) -> None:
        """Rewrite the append-only file."""
        self._wait_for_file()
        self._connection.bgrewriteaof()
        self._wait_for_file()

    def _wait_for_file(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            told = self._connection.info("persistence")
            if not (told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"]):
                return
            time.sleep(10 * _POLL_S)
        raise TimeoutError(f"the append-only file is still rewritten after {_PATIENCE_S:g} s")

    def drain(self, requests: int) -> Throughput:
        """Time the dispatch and answers of ``requests`` requests."""
        began = self.waiting
        end = began - requests
        if end < 0:
            sys.exit(f"{began} requests wait, {requests} should: workers that rest have taken some")
        self._yards.work()
        try:
            return measure_throughput(self._yards.pids, lambda: self._wait(began, end))
        finally:
            self._yards.rest()

    def _wait(self, began: int, end: int) -> int:
        until = time.monotonic() + _PATIENCE_S
        while (now := self.waiting) > end and self._yards.is_well():
            if time.monotonic() > until:
                raise TimeoutError(f"{now - end} requests are left after {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        return began - now

    def submit(self, requests: int) -> Latencies:
        """Time a client's single submissions."""
        times = []
        with Client(self._yards.url, yard=self._yards.names[0]) as client:
            prompt = prompts()[0]
            client.submit(prompt, max_tokens=32)
            for _ in range(requests):
                time.sleep(1 / _SUBMIT_RATE)
                began = time.perf_counter()
                client.submit(prompt, max_tokens=32)
                times.append((time.perf_counter() - began) * 1000)
        return Latencies(times)

    def check(self) -> int:
        """Check the answers not read yet; returns their number."""
        checked = 0
        for _, fields in self._connection.xrange(self._keys.replies(self._client)):
            for reply in decode_replies(fields):
                number = int(reply.id.partition("-")[2])
                if reply.tokens != answer(self._payloads[number % PROMPTS]):
                    sys.exit(f"{reply.id}: wrong answer {reply}")
                checked += 1
        return checked


@dataclass(frozen=True, slots=True)
class Depth:
    """The measurements at one size of the backlog, in turn with the empty yard."""

    waiting: int
    bytes_each: float  # beyond the payload
    first: tuple[Throughput, Throughput]  # right after the fill; deep, empty
    drains: Sequence[tuple[Throughput, Throughput]]
    submits: Sequence[tuple[Latencies, Latencies]]


def measure(
    server: ServerName, depths: Sequence[int], requests: int, submits: int, rounds: int
) -> list[Depth]:
    """Measure all depths in sequence."""
    with ExitStack() as stack:
        empty, deep = (
            Side(stack.enter_context(scale_yards(broker, Fleet())))
            for broker in [stack.enter_context(embedded_broker(server)) for _ in range(2)]
        )
        found = [_measure(empty, deep, depth, requests, submits, rounds) for depth in depths]
        if not empty.check() or not deep.check():
            sys.exit("no answer was found")
    return found


def _measure(
    empty: Side, deep: Side, waiting: int, requests: int, submits: int, rounds: int
) -> Depth:
    tell(f"backlog: {waiting:,}")
    before, was = deep.memory(), deep.waiting
    deep.fill(waiting)
    bytes_each = (deep.memory() - before) / (waiting - was) - deep.payload_bytes
    # The first drain after a large fill costs more: tables grow, pages are copied or marked dirty
    # after the fork, and the allocator still has the holes from the fill.
    first = _drain(empty, deep, waiting, requests)
    drains, told = [], []
    for _ in range(rounds):
        told.append((deep.submit(submits), empty.submit(submits)))
        drains.append(_drain(empty, deep, waiting, requests))
    return Depth(waiting, bytes_each, first, drains, told)


def _drain(empty: Side, deep: Side, waiting: int, requests: int) -> tuple[Throughput, Throughput]:
    empty.fill(requests)
    deep.fill(waiting + requests)
    return deep.drain(requests), empty.drain(requests)


def figures(depth: Depth) -> dict[str, float]:
    """Medians over the rounds; ratios to the empty yard are within a round."""
    drains, submits = depth.drains, depth.submits
    first, first_empty = depth.first
    costs = [(_cost_us(deep), _cost_us(empty)) for deep, empty in drains]
    p50s = [(deep.percentile(50), empty.percentile(50)) for deep, empty in submits]
    return {
        "bytes_beyond_payload": depth.bytes_each,
        "dispatched_per_s": median(deep.per_s for deep, _ in drains),
        "dispatched_per_s_empty": median(empty.per_s for _, empty in drains),
        "dispatch_ratio": median(deep.per_s / empty.per_s for deep, empty in drains),
        "us": median(deep for deep, _ in costs),
        "us_ratio": median(deep / empty for deep, empty in costs),
        "first_dispatch_ratio": first.per_s / first_empty.per_s,
        "first_us_ratio": _cost_us(first) / _cost_us(first_empty),
        "submit_p50_ms": median(deep for deep, _ in p50s),
        "submit_p50_ms_empty": median(empty for _, empty in p50s),
        "submit_ratio": median(deep / empty for deep, empty in p50s),
        "submit_p99_ms": median(deep.percentile(99) for deep, _ in submits),
    }


def _cost_us(throughput: Throughput) -> float:
    return sum(map(throughput.cpu_us, throughput.cpu_s))
