"""The workers alive now and how full their lanes are.

Nothing here is the truth: that is in Redis. The loads are a cache, kept by counting what was
dispatched and freed and set right once a second; `dispatch` has the last word on a full lane.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import redis

from coordinator.policies import Lane
from tokenyard.keys import Keys
from tokenyard.worker_info import WorkerInfo, decode_worker

REFRESH_S = 1.0


@dataclass(slots=True)
class Member:
    """A worker of the roster."""

    info: WorkerInfo
    lease_ms: float  # expiry by the server's clock; 0 lost, -1 left, -2 crashed
    load: int = 0
    is_quarantined: bool = False

    @property
    def may_serve(self) -> bool:
        """Whether requests may be given to it."""
        return self.lease_ms > 0 and self.info.state == "ready"


class Roster:
    """Reads the roster and the lanes' lengths."""

    def __init__(self, connection: redis.Redis, keys: Keys) -> None:
        self.members: dict[str, Member] = {}
        self.lost: list[str] = []  # workers whose leases have ended and whose lanes remain
        self._connection = connection
        self._keys = keys
        self._due = 0.0
        self._clock = time.time() * 1000 - time.monotonic() * 1000
        self._counted = (0, 0)  # id of the last event that the loads take into account

    def server_ms(self) -> float:
        """The server's time in ms since the epoch, about."""
        return self._clock + time.monotonic() * 1000

    def mark_stale(self) -> None:
        """Something changed: read again at the next occasion."""
        self._due = 0.0

    @property
    def is_stale(self) -> bool:
        """Whether it is known to have changed since it was read."""
        return not self._due

    def refresh(self) -> bool:
        """Read the yard again when that is due; whether it was read."""
        if time.monotonic() < self._due:
            return False
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.hgetall(self._keys.workers)
        pipeline.zrange(self._keys.leases, 0, -1, withscores=True)
        pipeline.hkeys(self._keys.quarantine)
        pipeline.time()
        entries, leases, alone, (seconds, micros) = pipeline.execute()
        now_ms = seconds * 1000 + micros // 1000
        self._clock = now_ms - time.monotonic() * 1000
        ends = {worker.decode(errors="replace"): score for worker, score in leases}
        self.lost = [worker for worker, score in ends.items() if score <= now_ms]
        self.members = {
            worker: Member(info, ends[worker], is_quarantined=worker.encode() in alone)
            for worker, info in _decode(entries).items()
            if worker in ends
        }
        self._read_loads()
        self._due = time.monotonic() + REFRESH_S
        return True

    def _read_loads(self) -> None:
        # No transaction: a server without memory refuses them. So the last event comes first: what
        # leaves a lane in between is counted twice, not never, and `dispatch` knows of a full lane.
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.xrevrange(self._keys.events, count=1)
        for worker in self.members:
            pipeline.xlen(self._keys.lane(worker))
        last, *loads = pipeline.execute()
        for member, load in zip(self.members.values(), loads, strict=True):
            member.load = load
        self._counted = _position(last[0][0].decode()) if last else (0, 0)

    def add_load(self, worker: str, *, alone: bool = False) -> None:
        """Count an entry that came onto a lane; with ``alone`` no other may follow it."""
        member = self.members.get(worker)
        if member:
            member.load += 1
            member.is_quarantined = member.is_quarantined or alone

    def free(self, worker: str, count: int, event: str) -> None:
        """Count entries that left a lane, unless they had left it when the loads were read."""
        member = self.members.get(worker)
        if member and _position(event) > self._counted:
            member.load = max(0, member.load - count)
        if member and member.is_quarantined:
            self.mark_stale()

    def lanes(self) -> Sequence[Lane]:
        """The lanes that may be given requests, in the order of their names."""
        serving = ((w, m) for w, m in self.members.items() if m.may_serve)
        lanes = [
            Lane(worker, m.info.name, m.info.model, m.load, m.info.lane_limit, m.is_quarantined)
            for worker, m in serving
        ]
        return sorted(lanes, key=lambda lane: (lane.name, lane.worker))

    def models(self) -> set[str]:
        """Names of the models that workers hold."""
        return {member.info.model for member in self.members.values()}


def _decode(entries: dict[bytes, bytes]) -> dict[str, WorkerInfo]:
    """Roster entries by worker; one that cannot be read belongs to nobody we can use."""
    decoded = {}
    for worker, packed in entries.items():
        try:
            decoded[worker.decode()] = decode_worker(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return decoded


def _position(entry: str) -> tuple[int, int]:
    """A stream entry's place in its stream."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)
