"""What goes on in a yard, for operators: read at one moment, changed by nothing here."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import redis

from tokenyard.broker.check import write_error
from tokenyard.protocol.control import DesiredStates, RunState, decode_desired
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass, Keys
from tokenyard.protocol.worker_info import (
    HostInfo,
    WorkerInfo,
    WorkerState,
    decode_host,
    decode_worker,
)

#: What the roster says, or what became of the lease, or that the entry cannot be read.
SeenState = WorkerState | Literal["lost", "left", "unreadable"]
_LEFT = -1


@dataclass(frozen=True, slots=True)
class LeaderView:
    """Who leads."""

    name: str
    epoch: int
    lease_ms: int  # what is left of it


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that has a roster entry or a lease."""

    worker: str
    state: SeenState
    lane: int  # entries
    lease_ms: int  # what is left of it; 0 where there is none
    info: WorkerInfo | None = None
    run_state: RunState = "RUNNING"  # what it does of what its desired state says

    @property
    def is_ready(self) -> bool:
        """Whether it holds a model and can serve."""
        return self.state == "ready"

    @property
    def is_serving(self) -> bool:
        """Whether it may be given requests now."""
        return self.is_ready and self.run_state == "RUNNING"


@dataclass(frozen=True, slots=True)
class YardView:
    """A yard at one moment."""

    yard: str
    leader: LeaderView | None
    waiting: dict[IntakeClass, int]  # requests by intake
    dead: int  # dead letters
    workers: Sequence[WorkerView]
    models: dict[str, int]  # ready workers by model
    handshake: dict[str, str]  # what clients learn: protocol version, limits, counters
    hosts: Sequence[HostInfo] = ()  # what each host may load
    desired_states: DesiredStates = field(
        default_factory=DesiredStates
    )  # what operators have told the workers
    broker_error: str = ""  # what the broker is where it takes no writes, and what to do
    at_ms: int = 0  # the server's clock

    @property
    def is_open(self) -> bool:
        """Whether somebody leads, and the broker takes requests."""
        return self.leader is not None and not self.broker_error

    @property
    def ready_workers(self) -> int:
        """How many workers hold a model and can serve."""
        return sum(worker.is_ready for worker in self.workers)

    def as_json(self) -> bytes:
        """The view as one JSON object, as `tokenyard info --json` prints it."""
        return msgspec.json.encode(self)


def read_yard(connection: redis.Redis, keys: Keys) -> YardView:
    """Look at a yard, in three round trips; the second asks for the lanes that the first named.

    The third asks whether the broker takes writes.

    Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
    """
    pipeline = connection.pipeline(transaction=False)
    pipeline.get(keys.leader)
    pipeline.pttl(keys.leader)
    pipeline.hgetall(keys.info)
    pipeline.hgetall(keys.workers)
    pipeline.zrange(keys.leases, 0, -1, withscores=True)
    pipeline.time()
    pipeline.xlen(keys.dead)
    pipeline.hvals(keys.hosts)
    pipeline.hgetall(keys.desired)
    for name in INTAKE_CLASSES:
        pipeline.xlen(keys.intake(name))
    leader, leader_ms, handshake, roster, leases, now, dead, hosts, desired_states, *waiting = (
        pipeline.execute()
    )
    now_ms = now[0] * 1000 + now[1] // 1000
    ends = {_text(worker): int(score) for worker, score in leases}
    entries = {_text(worker): packed for worker, packed in roster.items()}
    names = sorted(ends.keys() | entries.keys())
    lanes = _lane_lengths(connection, keys, names)
    workers = [
        _worker_view(name, entries.get(name), ends.get(name, 0), now_ms, lane)
        for name, lane in zip(names, lanes, strict=True)
    ]
    return YardView(
        yard=keys.yard,
        leader=_leader_view(leader, leader_ms),
        waiting=dict(zip(INTAKE_CLASSES, waiting, strict=True)),
        dead=dead,
        workers=workers,
        models=_models(workers),
        handshake=_texts(handshake),
        hosts=_hosts(hosts, workers),
        desired_states=decode_desired(desired_states),
        broker_error=write_error(connection, keys),
        at_ms=now_ms,
    )


def _lane_lengths(connection: redis.Redis, keys: Keys, workers: Sequence[str]) -> list[int]:
    pipeline = connection.pipeline(transaction=False)
    for worker in workers:
        pipeline.xlen(keys.lane(worker))
    lengths: list[int] = pipeline.execute()
    return lengths


def _worker_view(
    worker: str, packed: bytes | None, lease_end_ms: int, now_ms: int, lane: int
) -> WorkerView:
    info = _info(packed)
    return WorkerView(
        worker=worker,
        state=_state(packed, info, lease_end_ms, now_ms),
        lane=lane,
        lease_ms=max(0, lease_end_ms - now_ms),
        info=info,
        run_state=info.run_state if info else "RUNNING",
    )


def _info(packed: bytes | None) -> WorkerInfo | None:
    if packed is None:
        return None
    try:
        return decode_worker(packed)
    except msgspec.MsgspecError:
        return None


def _state(
    packed: bytes | None, info: WorkerInfo | None, lease_end_ms: int, now_ms: int
) -> SeenState:
    if lease_end_ms == _LEFT:
        return "left"
    if lease_end_ms <= now_ms:
        return "lost"
    if info is None:
        return "unreadable" if packed else "lost"
    return info.state


def _leader_view(packed: bytes | None, lease_ms: int) -> LeaderView | None:
    if packed is None:
        return None
    epoch, _, name = _text(packed).partition(":")
    return LeaderView(name, int(epoch) if epoch.isdigit() else 0, max(0, lease_ms))


def _hosts(packed: Sequence[bytes], workers: Sequence[WorkerView]) -> list[HostInfo]:
    """The hosts that have a worker; an entry that a dead host has left says nothing."""
    alive = {worker.info.controller for worker in workers if worker.info and worker.lease_ms}
    found = []
    for entry in packed:
        with contextlib.suppress(msgspec.MsgspecError):
            found.append(decode_host(entry))
    return sorted((host for host in found if host.name in alive), key=lambda host: host.name)


def _models(workers: Sequence[WorkerView]) -> dict[str, int]:
    held = (worker.info.model for worker in workers if worker.is_ready and worker.info)
    return dict(sorted(Counter(held).items()))


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in fields.items()}


def _text(value: Any) -> str:
    """Whatever lies there as text that can be shown."""
    return bytes(value).decode(errors="replace")
