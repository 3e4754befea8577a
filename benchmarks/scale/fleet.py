"""Plays many workers in one process, for `benchmarks.scale`.

To the yard they are real: the library's scripts register each; it keeps its lease, reads its lane
over its own blocking connection like a lane reader, and publishes each step's results with
`finish`. Eight workers share a controller, which renews their leases in one call and reports what
its host may load. They only lack an engine: the answer to a request is the first tokens of its
prompt, as soon as STEP requests have arrived, or no more arrive within a second.

    python -m benchmarks.scale.fleet URL WORKERS MAX_NUM_SEQS STEP YARD...

SIGUSR1 stops all of them from reading, like a pause; SIGUSR2 ends that.
"""

from __future__ import annotations

import itertools
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import hiredis
import msgspec

from tokenyard.broker.connection import open_connection
from tokenyard.process.interpreter import collect_seldom
from tokenyard.process.wake_pipe import WakeupPipe
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.replies import Provenance, Reply, Usage, json_text
from tokenyard.protocol.wire import Assignment
from tokenyard.protocol.worker_info import (
    HostInfo,
    ModelInfo,
    WorkerInfo,
    WorkerTotals,
    encode_worker,
)
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Publication, Published
from worker.host.membership import lane_limit
from worker.process.stream_reader import COUNT

MODEL: Final = "simulated"
#: Tokens per answer.
ANSWER_TOKENS: Final = 32
HOST_WORKERS: Final = 8
LEASE_MS: Final = 30_000
#: Leases are renewed after a third of their time, and once a second if counts have changed.
_RENEW_S: Final = LEASE_MS / 3000
_COUNT_S: Final = 1.0
_BLOCK_MS: Final = 1_000
_RECV_BYTES: Final = 1 << 20


def answer(prompt: bytes) -> bytes:
    """A played worker's packed answer to a packed prompt."""
    return prompt[: 4 * ANSWER_TOKENS]


class PlayedWorker:
    """One worker: its lane and its roster entry."""

    def __init__(
        self, scripts: Scripts, info: WorkerInfo, step: int, address: tuple[str, int]
    ) -> None:
        self._scripts = scripts
        self._info = info
        self._step = step
        self._gathered: list[Assignment] = []
        self.worker = scripts.register(info.name, LEASE_MS, encode_worker(info))
        self.socket = socket.create_connection(address, timeout=10.0)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        self._last = b"0"
        self.finished = 0
        self._provenance = json_text(Provenance(MODEL, "", info.engine, "1", self.worker, 1))
        self._ask()

    def _ask(self) -> None:
        """Start a blocking read of the lane, like a lane reader."""
        lane = self._scripts.keys.lane(self.worker)
        words: Any = ("XREAD", "COUNT", COUNT, "BLOCK", _BLOCK_MS, "STREAMS", lane)
        self.socket.sendall(hiredis.pack_command((*words, self._last)))

    def take(self) -> None:
        """Take a complete reply to the read, and make a step if there are enough requests."""
        data = self.socket.recv(_RECV_BYTES)
        if not data:
            raise ConnectionError(f"{self.worker}: the broker has closed the connection")
        self._reader.feed(data)
        said: Any = self._reader.gets()
        if said is False:
            return
        if isinstance(said, Exception):
            raise said
        entries = said[0][1] if said else []
        if entries:
            self._last = entries[-1][0]
        self._ask()
        self._gathered += _assignments(entries)
        if self._gathered and (len(self._gathered) >= self._step or not entries):
            self._publish(self._gathered)
            self._gathered = []

    def _publish(self, assignments: Sequence[Assignment]) -> None:
        codes = self._scripts.finish(
            self.worker, [Publication(one, self._reply(one)) for one in assignments]
        )
        if any(code is not Published.PUBLISHED for code in codes):
            raise RuntimeError(f"{self.worker}: published with {codes}")
        self.finished += len(assignments)

    def _reply(self, assignment: Assignment) -> Reply:
        prompt = assignment.request.tokens or b""
        tokens = answer(prompt)
        sizes = (len(prompt) // 4, len(tokens) // 4, (len(prompt) + len(tokens)) // 4)
        return Reply(
            id=assignment.request.id,
            event="result",
            seq=0,
            tokens=tokens,
            status="completed",
            finish_reason="length",
            usage=json_text(Usage(*sizes)),
            provenance=self._provenance,
            timing='{"queue_ms":1,"engine_ms":1.0}',
        )

    def entry(self) -> bytes:
        """Its current roster entry."""
        tally = WorkerTotals(finished=self.finished, tokens=ANSWER_TOKENS * self.finished)
        return encode_worker(msgspec.structs.replace(self._info, tally=tally))


def _assignments(entries: Sequence[Any]) -> Iterator[Assignment]:
    for entry, fields in entries:
        assignment = parse_assignment(
            entry.decode(), dict(zip(fields[::2], fields[1::2], strict=True))
        )
        if assignment is None:
            raise RuntimeError(f"entry {entry!r} is no assignment")
        yield assignment


class PlayedHost:
    """A controller, which keeps the leases of some workers."""

    def __init__(
        self,
        scripts: Scripts,
        name: str,
        infos: Sequence[WorkerInfo],
        step: int,
        address: tuple[str, int],
    ) -> None:
        self._scripts = scripts
        model = ModelInfo(name=MODEL, load_s=1.0)
        self._info = HostInfo(name=name, host=name, devices=len(infos), models=[model])
        scripts.publish_host(self._info)
        self.workers = [PlayedWorker(scripts, info, step, address) for info in infos]
        self._renewed_at = time.monotonic()
        self._shown = 0  # results counted in the roster

    def keep(self, now: float) -> None:
        """Renew the leases if due."""
        finished = sum(one.finished for one in self.workers)
        pause_s = _COUNT_S if finished != self._shown else _RENEW_S
        if now - self._renewed_at < pause_s:
            return
        held = self._scripts.renew(LEASE_MS, [(one.worker, one.entry()) for one in self.workers])
        if not all(held):
            raise RuntimeError(f"{self._info.name}: a lease was lost")
        self._scripts.publish_host(self._info)
        self._renewed_at, self._shown = now, finished


def _info(host: str, max_num_seqs: int, device: int) -> WorkerInfo:
    now_ms = int(time.time() * 1000)
    return WorkerInfo(
        name=f"{host}.{device}",
        state="ready",
        model=MODEL,
        engine="simulated",
        engine_version="1",
        host=host,
        max_num_seqs=max_num_seqs,
        lane_limit=lane_limit(max_num_seqs),
        max_model_len=4096,
        vocab_size=32_000,
        started_ms=now_ms,
        phases_s={"warm": 1.0, "load": 1.0},
        controller=host,
        device=device,
        since_ms=now_ms,
        memory_bytes=1 << 30,
        warm_bytes=1 << 29,
        lease_ms=LEASE_MS,
        cache_tokens=100_000,
    )


def play(url: str, workers: int, max_num_seqs: int, step: int, yards: Sequence[str]) -> None:
    """Play ``workers`` workers in each yard until the process is ended."""
    # No `threading.Event`: one signal may interrupt the handler of the other, which holds its lock.
    is_at_rest, bell = False, WakeupPipe()

    def heed(number: int, _: object) -> None:
        nonlocal is_at_rest
        is_at_rest = number == signal.SIGUSR1
        bell.set()

    signal.signal(signal.SIGUSR1, heed)
    signal.signal(signal.SIGUSR2, heed)
    connection = open_connection(url)
    target = urlsplit(url)
    address = (target.hostname or "127.0.0.1", target.port or 6379)
    hosts: list[PlayedHost] = []
    for yard, first in itertools.product(yards, range(0, workers, HOST_WORKERS)):
        name = f"host-{first // HOST_WORKERS:03d}"
        infos = [_info(name, max_num_seqs, at) for at in range(min(HOST_WORKERS, workers - first))]
        hosts.append(PlayedHost(Scripts(Yard(connection, Keys(yard))), name, infos, step, address))
    with selectors.DefaultSelector() as selector:
        # A signal alone does not end `select`, which continues for its remaining time.
        selector.register(bell, selectors.EVENT_READ, bell.clear)
        for host in hosts:
            for worker in host.workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker.take)
        for host in itertools.cycle(hosts):
            host.keep(time.monotonic())
            pause_s = _COUNT_S / len(hosts)
            if is_at_rest:
                # Not a sleep: the end of a rest must take effect immediately; timing starts then.
                bell.wait(pause_s)
                continue
            for key, _ in selector.select(pause_s):
                key.data()


def main() -> None:
    """Run until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    collect_seldom()
    url, workers, max_num_seqs, step, *yards = sys.argv[1:]
    play(url, int(workers), int(max_num_seqs), int(step), yards)


if __name__ == "__main__":
    main()
