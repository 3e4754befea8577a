"""A read-only view of a yard at one moment, and the one reader of its roster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokenyard.broker.check import write_error
from tokenyard.protocol.control import DesiredStates, RunState, decode_desired
from tokenyard.protocol.keys import IntakeClass, Keys, Yard
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.worker_info import (
    HostInfo,
    WorkerInfo,
    WorkerState,
    decode_hosts,
    decode_workers,
    split_hosts,
)
from tokenyard.telemetry.queues import depths_of, queue_depths

#: The state in the roster, or that of a lost or returned lease, or of an unreadable entry.
SeenState = WorkerState | Literal["lost", "left", "unreadable"]
_LEFT = -1


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The leader."""

    name: str
    epoch: int
    lease_ms: int  # time left


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that has a roster entry or a lease."""

    worker: str
    state: SeenState
    lane: int  # entries on its lane; 0 where lanes were not counted
    lease_ms: int  # time left; 0: no lease
    info: WorkerInfo | None = None
    run_state: RunState = "RUNNING"  # the one that it has reached

    @property
    def is_ready(self) -> bool:
        """Whether it holds a model and can serve."""
        return self.state == "ready"

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests now."""
        return self.is_ready and self.run_state == "RUNNING"


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterView:
    """The workers and hosts of a yard at one moment; lanes are not counted."""

    workers: Sequence[WorkerView]
    hosts: Sequence[HostInfo] = ()  # that have a worker with a lease
    gone: Sequence[HostInfo] = ()  # others, with the models that they alone announce
    desired_states: DesiredStates = field(default_factory=DesiredStates)  # set by operators
    at_ms: int = 0  # the server's clock

    @property
    def live(self) -> dict[str, WorkerInfo]:
        """The workers that hold a lease, by name and incarnation."""
        return {one.worker: one.info for one in self.workers if one.lease_ms and one.info}


@dataclass(frozen=True, slots=True, kw_only=True)
class YardView(RosterView):
    """A yard at one moment."""

    yard: str
    leader: LeaderView | None
    waiting: dict[IntakeClass, int]  # requests by intake
    dead: int  # dead letters
    models: dict[str, int]  # ready workers by model
    handshake: dict[str, str]  # protocol version, limits, counters, for clients
    broker_error: str = ""  # why the broker takes no writes, and what to do

    @property
    def is_open(self) -> bool:
        """Whether a coordinator leads and the broker takes writes."""
        return self.leader is not None and not self.broker_error

    @property
    def living(self) -> list[WorkerView]:
        """The workers with a lease and a readable entry."""
        return [worker for worker in self.workers if worker.lease_ms and worker.info]

    @property
    def ready_workers(self) -> int:
        """The number of workers that hold a model and can serve."""
        return sum(worker.is_ready for worker in self.workers)


def read_roster(yard: Yard) -> RosterView:
    """Read workers, hosts and desired states in one round trip; errors of redis-py pass."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    _queue_roster(pipeline, yard.keys)
    return _roster(*pipeline.execute())


def read_yard(yard: Yard, *, counts_lanes: bool = True) -> YardView:
    """Read a yard in three round trips: its state, the lengths of its lanes, and a write check.

    Without ``counts_lanes`` all lanes seem empty, and the number of keys that are read does not
    depend on that of the workers. Errors of redis-py pass, for
    `tokenyard.broker.connection.translated`.
    """
    pipeline: Any = yard.connection.pipeline(transaction=False)
    _queue_roster(pipeline, yard.keys)
    pipeline.get(yard.keys.leader)
    pipeline.pttl(yard.keys.leader)
    pipeline.hgetall(yard.keys.info)
    pipeline.xlen(yard.keys.dead)
    queue_depths(pipeline, yard.keys)
    listed, leases, hosts, desired, now, *rest = pipeline.execute()
    leader, leader_ms, handshake, dead, *depths = rest
    roster = _roster(listed, leases, hosts, desired, now)
    workers = with_lanes(yard, roster.workers) if counts_lanes else roster.workers
    return YardView(
        yard=yard.keys.yard,
        leader=_leader_view(leader, leader_ms),
        waiting=depths_of(depths),
        dead=dead,
        workers=workers,
        models=_models(workers),
        handshake=_texts(handshake),
        hosts=roster.hosts,
        gone=roster.gone,
        desired_states=roster.desired_states,
        broker_error=write_error(yard),
        at_ms=roster.at_ms,
    )


def with_lanes(yard: Yard, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The same workers with the lengths of their lanes."""
    pipeline = yard.connection.pipeline(transaction=False)
    for worker in workers:
        pipeline.xlen(yard.keys.lane(worker.worker))
    lengths: list[int] = pipeline.execute()
    return [replace(worker, lane=lane) for worker, lane in zip(workers, lengths, strict=True)]


def _queue_roster(pipeline: Any, keys: Keys) -> None:
    """Queue the commands whose replies `_roster` takes."""
    pipeline.hgetall(keys.workers)
    pipeline.zrange(keys.leases, 0, -1, withscores=True)
    pipeline.hgetall(keys.hosts)
    pipeline.hgetall(keys.desired)
    pipeline.time()


def _roster(roster: Any, leases: Any, hosts: Any, desired: Any, now: tuple[int, int]) -> RosterView:
    now_ms = unix_ms(now)
    ends = {_text(worker): int(score) for worker, score in leases}
    listed, infos = set(map(_text, roster)), decode_workers(roster)
    workers = []
    for name in sorted(ends.keys() | listed):
        info, end_ms = infos.get(name), ends.get(name, 0)
        workers.append(
            WorkerView(
                worker=name,
                state=_state(info, end_ms, now_ms, is_listed=name in listed),
                lane=0,
                lease_ms=max(0, end_ms - now_ms),
                info=info,
                run_state=info.run_state if info else "RUNNING",
            )
        )
    alive = {worker.info.controller for worker in workers if worker.info and worker.lease_ms}
    there, gone = split_hosts(sorted(decode_hosts(hosts), key=lambda host: host.name), alive)
    return RosterView(
        workers=workers,
        hosts=there,
        gone=gone,
        desired_states=decode_desired(desired),
        at_ms=now_ms,
    )


def _state(
    info: WorkerInfo | None, lease_end_ms: int, now_ms: int, *, is_listed: bool
) -> SeenState:
    if lease_end_ms == _LEFT:
        return "left"
    if lease_end_ms <= now_ms:
        return "lost"
    if info is None:
        return "unreadable" if is_listed else "lost"
    return info.state


def _leader_view(packed: bytes | None, lease_ms: int) -> LeaderView | None:
    if packed is None:
        return None
    epoch, _, name = _text(packed).partition(":")
    return LeaderView(name, int(epoch) if epoch.isdigit() else 0, max(0, lease_ms))


def _models(workers: Sequence[WorkerView]) -> dict[str, int]:
    held = (worker.info.model for worker in workers if worker.is_ready and worker.info)
    return dict(sorted(Counter(held).items()))


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in fields.items()}


def _text(value: Any) -> str:
    """Any bytes as text."""
    return bytes(value).decode(errors="replace")


def read_standbys(yard: Yard, leader: LeaderView | None, now_ms: int) -> list[str]:
    """Names of the coordinators that have said in the last half minute that they stand by."""
    found: Any = yard.connection.zrange(yard.keys.standbys, 0, -1, withscores=True)
    names = {name.decode(errors="replace") for name, until_ms in found if until_ms > now_ms}
    return sorted(names - ({leader.name} if leader else set()))
