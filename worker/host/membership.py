"""The workers of one host in the yard: registration, leases, departure.

Leases are renewed by a thread of the controller with its own connection, so that neither a busy
engine nor a slow start of another process lets one expire.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec
import redis

from tokenyard import clock
from tokenyard.broker.outage import Outage
from tokenyard.protocol.worker_info import (
    HostInfo,
    WorkerInfo,
    WorkerState,
    WorkerTotals,
    encode_worker,
)
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Why
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State

log = logging.getLogger("tokenyard.worker.membership")

#: How far the roster's statistics may lag behind.
COUNT_S: Final = 1.0


class Membership:
    """Holds the leases of this host's workers."""

    def __init__(self, scripts: Scripts, lease_ms: int, on_lost: Callable[[str], None]) -> None:
        self._scripts = scripts
        self._lease_ms = lease_ms
        self._on_lost = on_lost
        self._entries: dict[str, WorkerInfo] = {}
        self._host: HostInfo | None = None
        self._lock = threading.Lock()
        self._is_counted = False  # the roster's statistics are out of date
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Begin renewing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; the host's entry stays, with the time of its end. Idempotent."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        host, self._host = self._host, None
        if host:
            # What a yard was configured to serve is known at zero workers, too.
            with contextlib.suppress(redis.RedisError):
                self._scripts.publish_host(msgspec.structs.replace(host, left_ms=clock.wall_ms()))

    def publish(self, host: HostInfo) -> None:
        """Publish what this host may load, now and with each renewal."""
        with self._lock:
            self._host = host
        self._wake.set()

    def join(self, entry: WorkerInfo) -> str:
        """Register a worker; its name with incarnation. Raises `redis.RedisError`."""
        worker = self._scripts.register(entry.name, self._lease_ms, self._packed(entry))
        with self._lock:
            self._entries[worker] = entry
        log.info("%s joins", worker)
        return worker

    def show(self, worker: str, entry: WorkerInfo) -> None:
        """Change a worker's roster entry, now."""
        with self._lock:
            if worker in self._entries:
                self._entries[worker] = entry
        self._wake.set()

    def count(self, worker: str, tally: WorkerTotals, error: str = "", error_ms: int = 0) -> None:
        """Change a worker's statistics in the roster, within a second."""
        with self._lock:
            entry = self._entries.get(worker)
            if entry is None or (entry.tally, entry.last_error_ms) == (tally, error_ms):
                return
            self._entries[worker] = msgspec.structs.replace(
                entry, tally=tally, last_error=error, last_error_ms=error_ms
            )
            self._is_counted = True

    def forget(self, worker: str) -> None:
        """Stop renewing this lease."""
        with self._lock:
            self._entries.pop(worker, None)

    def leave(self, worker: str, why: Why, reason: str = "") -> None:
        """End a lease so that the lane is rescued immediately. Raises `redis.RedisError`.

        If Redis is unreachable the lease simply expires.
        """
        self.forget(worker)
        rest = self._scripts.retire(worker, why, reason)
        log.info("%s: %s, %d entries go back: %s", worker, why, max(0, rest), reason or "stopped")

    def renew(self) -> None:
        """Renew all leases once. Raises `redis.RedisError`."""
        with self._lock:
            entries, host = list(self._entries.items()), self._host
            self._is_counted = False
        packed = [(worker, self._packed(entry)) for worker, entry in entries]
        held = self._scripts.renew(self._lease_ms, packed) if packed else []
        for (worker, _), is_held in zip(entries, held, strict=True):
            if not is_held:
                self.forget(worker)
                self._on_lost(worker)
        if host:
            # A server that is out of memory refuses this; the leases matter more.
            with contextlib.suppress(redis.exceptions.OutOfMemoryError):
                self._scripts.publish_host(host)

    def _packed(self, entry: WorkerInfo) -> bytes:
        return encode_worker(msgspec.structs.replace(entry, lease_ms=self._lease_ms))

    def _run(self) -> None:
        outage = Outage(log, "renewing leases", longest_pause_s=1.0)
        while not self._stop.is_set():
            try:
                self.renew()
                outage.over()
                pause_s = self._lease_ms / 3000
            except redis.RedisError as error:
                pause_s = outage.note(error)
            self._wait(pause_s)

    def _wait(self, seconds: float) -> None:
        """Wait until an entry or the statistics change, at most so many seconds."""
        until = clock.monotonic() + seconds
        while (left := until - clock.monotonic()) > 0:
            if clock.wait(self._wake, min(left, COUNT_S)) or self._is_counted:
                break
        self._wake.clear()


# The roster entry of a process.

#: What the roster shows of a state; of any other it is "failed".
SHOWN: Final[dict[State, WorkerState]] = {
    State.WARMING: "warming",
    State.WARM: "warm",
    State.LOADING: "loading",
    State.READY: "ready",
    State.DRAINING: "draining",
    State.DRAINED: "draining",
    State.ASLEEP: "asleep",
    State.UNLOADING: "unloading",
    State.ATTACHED: "attached",
}


def lane_limit(max_num_seqs: int) -> int:
    """Most entries on a lane: what its engine runs at once and a quarter more, read ahead."""
    return max_num_seqs + max(1, max_num_seqs // 4)


def roster_entry(
    member: WorkerProcessHandle, controller: str, group: list[str], swapped_ms: int
) -> WorkerInfo:
    """The roster entry; the engine's fields are empty while there is none."""
    engine = member.engine
    max_num_seqs = engine.max_num_seqs if engine else 1
    return WorkerInfo(
        name=member.name,
        state=SHOWN.get(member.state, "failed"),
        model=member.model,
        revision=engine.revision if engine else "",
        engine=engine.engine if engine else "",
        engine_version=engine.engine_version if engine else "",
        host=socket.gethostname(),
        pid=member.pid or os.getpid(),
        max_num_seqs=max_num_seqs,
        lane_limit=lane_limit(max_num_seqs),
        max_model_len=engine.max_model_len if engine else 0,
        vocab_size=engine.vocab_size if engine else 0,
        tokenizer=engine.tokenizer if engine else "",
        started_ms=int((clock.wall() - member.lived_s) * 1000),
        phases_s={phase: round(seconds, 4) for phase, seconds in member.phases_s.items()},
        controller=controller,
        device=member.device,
        adapters=list(engine.adapters) if engine else [],
        group=group,
        since_ms=int(member.since * 1000),
        swapped_ms=swapped_ms,
        memory_bytes=member.memory.now.scarce if member.memory.now else 0,
        warm_bytes=member.memory.baseline.scarce if member.memory.baseline else 0,
        run_state=member.observed.run_state,
        epoch=member.observed.epoch,
        weights=member.observed.weights,
        obeyed=member.observed.obeyed,
        tally=member.tally,
        last_error=member.last_error,
        last_error_ms=member.last_error_ms,
        cache_tokens=engine.cache_tokens if engine else 0,
        core_pid=member.core.process.pid or 0 if member.core else 0,
        tasks=list(engine.tasks) if engine else [],
    )
