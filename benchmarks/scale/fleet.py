"""Plays many workers in one process, for `benchmarks.scale`.

To the yard they are real: each is registered by the library's scripts and keeps its lease, reads
its lane over a blocking connection of its own as a lane reader does, and publishes the results of
each step by `finish`. Eight share a controller, which renews their leases in one call and says what
its host may load. What they lack is an engine: a request is answered with the first tokens of its
prompt, as soon as STEP requests have come, or no more within a second.

    python -m benchmarks.scale.fleet URL WORKERS SLOTS STEP YARD...

SIGUSR1 has all of them read nothing more, as a pause does; SIGUSR2 ends that.
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
from tokenyard.process.gc_tuning import collect_seldom
from tokenyard.process.wake_pipe import WakeupPipe
from tokenyard.protocol.keys import Keys
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
from tokenyard.scripts import Publication, Published, Renewed, Scripts
from worker.host.roster_entry import lane_limit
from worker.process.stream_reader import StreamReader

MODEL: Final = "simulated"
#: Tokens of an answer.
ANSWER_TOKENS: Final = 32
HOST_WORKERS: Final = 8
LEASE_MS: Final = 30_000
#: Leases are renewed at a third of the way, and once a second where there are new counts.
_RENEW_S: Final = LEASE_MS / 3000
_COUNT_S: Final = 1.0
_BLOCK_MS: Final = 1_000
_RECV_BYTES: Final = 1 << 20


def answer(prompt: bytes) -> bytes:
    """What a played worker answers to a packed prompt, packed."""
    return prompt[: 4 * ANSWER_TOKENS]


class PlayedWorker:
    """One worker: its lane, and what the roster says of it."""

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
        """Wait for what comes onto the lane, as a lane reader does."""
        lane = self._scripts.keys.lane(self.worker)
        words: Any = ("XREAD", "COUNT", StreamReader.count, "BLOCK", _BLOCK_MS, "STREAMS", lane)
        self.socket.sendall(hiredis.pack_command((*words, self._last)))

    def take(self) -> None:
        """Take what has come, once it is whole, and make a step where it is enough for one."""
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
        """What the roster should say of it now."""
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
    """A controller with some workers, whose leases it keeps."""

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
        self._shown = 0  # results that the roster knows of

    def keep(self, now: float) -> None:
        """Renew the leases, when that is due."""
        finished = sum(one.finished for one in self.workers)
        pause_s = _COUNT_S if finished != self._shown else _RENEW_S
        if now - self._renewed_at < pause_s:
            return
        codes = self._scripts.renew(LEASE_MS, [(one.worker, one.entry()) for one in self.workers])
        if any(code is not Renewed.HELD for code in codes):
            raise RuntimeError(f"{self._info.name}: a lease was lost")
        self._scripts.publish_host(self._info)
        self._renewed_at, self._shown = now, finished


def _info(host: str, slots: int, device: int) -> WorkerInfo:
    now_ms = int(time.time() * 1000)
    return WorkerInfo(
        name=f"{host}.{device}",
        state="ready",
        model=MODEL,
        engine="simulated",
        engine_version="1",
        host=host,
        slots=slots,
        lane_limit=lane_limit(slots),
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


def play(url: str, workers: int, slots: int, step: int, yards: Sequence[str]) -> None:
    """Play so many workers in each yard, until the process is ended."""
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
        infos = [_info(name, slots, at) for at in range(min(HOST_WORKERS, workers - first))]
        hosts.append(PlayedHost(Scripts(connection, Keys(yard)), name, infos, step, address))
    with selectors.DefaultSelector() as selector:
        # A signal alone does not end `select`: it goes on for what is left of its time.
        selector.register(bell, selectors.EVENT_READ, bell.clear)
        for host in hosts:
            for worker in host.workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker.take)
        for host in itertools.cycle(hosts):
            host.keep(time.monotonic())
            pause_s = _COUNT_S / len(hosts)
            if is_at_rest:
                # Not a sleep: the end of a rest must be heard at once, it is where a clock begins.
                bell.wait(pause_s)
                continue
            for key, _ in selector.select(pause_s):
                key.data()


def main() -> None:
    """Until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    collect_seldom()
    url, workers, slots, step, *yards = sys.argv[1:]
    play(url, int(workers), int(slots), int(step), yards)


if __name__ == "__main__":
    main()
