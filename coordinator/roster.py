"""The living workers, the loads of their lanes, what their hosts may load, and who is paused.

The truth is in Redis. The loads are a cache: what was dispatched and freed is counted, and they are
read again once a second; `dispatch` decides whether a lane is full.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from coordinator.routing.lanes import Lanes, in_turn
from coordinator.routing.policies import Lane
from coordinator.routing.suspicion import UNMARKED, QuarantineMark, read_mark
from tokenyard import clock
from tokenyard.clock import BrokerTime
from tokenyard.protocol.control import (
    ALL,
    RUN_STATES,
    DesiredStates,
    RunState,
    decode_desired,
    model_scope,
    worker_scope,
)
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import position, unix_ms
from tokenyard.protocol.worker_info import (
    HostInfo,
    ModelInfo,
    OutputDefaults,
    WorkerInfo,
    decode_hosts,
    decode_workers,
    split_hosts,
)

log = logging.getLogger("tokenyard.coordinator.roster")

REFRESH_S = 1.0
#: The mark of a lane that got suspects since it was read.
TO_BE_READ = QuarantineMark("?")
#: The entry of a host is deleted when no worker has named that host for so long, unless it alone
#: announces a model.
HOST_GONE_S = 60.0
#: Then it is kept for so long, and where the yard has no host, until one comes.
LIST_KEPT_S = 30 * 86400.0


@dataclass(slots=True)
class RosterMember:
    """A worker of the roster."""

    info: WorkerInfo
    lease_ms: float  # expiry by the server's clock; 0 lost, -1 left, -2 crashed
    load: int = 0
    #: Tokens on its lane, and the last event that they include.
    work: int = 0
    weighed: tuple[int, int] = (0, 0)
    mark: QuarantineMark = UNMARKED  # what is on trial on its lane
    run_state: RunState = "RUNNING"  # see `_run_state`
    worked_ms: float = 0.0  # when it last had work, by the server's clock; 0: never

    @property
    def is_quarantined(self) -> bool:
        """Whether its lane is closed because suspects are on trial there."""
        return not self.mark.is_open

    @property
    def has_lease(self) -> bool:
        """Whether it is alive, as far as is known."""
        return self.lease_ms > 0

    @property
    def serves(self) -> bool:
        """Whether it is ready with a model, though perhaps paused."""
        return self.has_lease and self.info.state == "ready" and bool(self.info.model)

    @property
    def may_serve(self) -> bool:
        """Whether requests may be given to it."""
        return self.serves and self.run_state == "RUNNING"


class Roster:
    """Reads the roster, the hosts, and the lanes' lengths."""

    def __init__(self, yard: Yard, *, has_log: bool = True) -> None:
        """``has_log`` says whether it logs the workers that begin or cease to serve."""
        self.members: dict[str, RosterMember] = {}
        self.hosts: dict[str, HostInfo] = {}  # by controller; those of workers with a lease
        self.gone: Sequence[HostInfo] = ()  # others, with the models that they alone announce
        self.lost: list[str] = []  # workers whose leases have ended and whose lanes remain
        self.servable: set[str] = set()  # base models that workers hold or may load
        self.lanes: dict[str, Lanes] = {}  # those that may be given requests, by model
        self.desired_states = DesiredStates()  # set by operators
        self._unnamed: dict[bytes, float] = {}  # hosts without workers, since when (monotonic)
        self._has_log = has_log
        self._yard = yard
        self._due = 0.0
        self.broker_time = BrokerTime()
        self._counted = (0, 0)  # id of the last event that the loads include

    @property
    def longest_lease_ms(self) -> int:
        """The length of the longest lease that a worker asks for."""
        return max((m.info.lease_ms for m in self.members.values()), default=0)

    def measure_time(self) -> None:
        """Ask for the broker's time when that is due; `refresh` does it, too."""
        if self.broker_time.is_due:
            asked_at = clock.monotonic()
            told: Any = self._yard.connection.time()
            self.broker_time.measured(told, asked_at)

    def mark_stale(self) -> None:
        """Something changed: read again in the next turn."""
        self._due = 0.0

    @property
    def is_stale(self) -> bool:
        """Whether it is known to have changed since it was read."""
        return not self._due

    def refresh(self) -> bool:
        """Read the yard again when that is due; whether it was read."""
        if clock.monotonic() < self._due:
            return False
        pipeline = self._yard.connection.pipeline(transaction=False)
        pipeline.hgetall(self._yard.keys.workers)
        pipeline.zrange(self._yard.keys.leases, 0, -1, withscores=True)
        pipeline.hgetall(self._yard.keys.quarantine)
        pipeline.hgetall(self._yard.keys.hosts)
        pipeline.hgetall(self._yard.keys.desired)
        pipeline.time()
        asked_at = clock.monotonic()
        entries, leases, marks, hosts, desired, now = pipeline.execute()
        now_ms = unix_ms(now)
        self.broker_time.measured(now, asked_at)
        ends = {worker.decode(errors="replace"): score for worker, score in leases}
        self.lost = [worker for worker, score in ends.items() if score <= now_ms]
        self.desired_states = decode_desired(desired)
        before = self.members
        self.members = {
            worker: RosterMember(
                info,
                ends[worker],
                work=before[worker].work if worker in before else 0,
                weighed=before[worker].weighed if worker in before else (0, 0),
                mark=read_mark(marks.get(worker.encode())),
                run_state=_run_state(info, self.desired_states),
                worked_ms=before[worker].worked_ms if worker in before else 0.0,
            )
            for worker, info in decode_workers(entries).items()
            if worker in ends
        }
        if self._has_log:
            self._log_changes(before)
        self._take_hosts(hosts)
        self._read_loads()
        self._due = clock.monotonic() + REFRESH_S
        return True

    def _log_changes(self, before: Mapping[str, RosterMember]) -> None:
        """Name the workers that have begun to serve a model, and those that serve it no more."""
        earlier, now = (
            {(worker, member.info.model) for worker, member in members.items() if member.serves}
            for members in (before, self.members)
        )
        for worker, model in sorted(now - earlier):
            log.info("%s serves %s", worker, model)
        for worker, model in sorted(earlier - now):
            log.info("%s does not serve %s any more", worker, model)

    def _take_hosts(self, entries: Mapping[bytes, bytes]) -> None:
        """Tell hosts that living workers name from others, and note since when these are gone."""
        named = {m.info.controller for m in self.members.values() if m.has_lease}
        there, self.gone = split_hosts(decode_hosts(entries), named)
        self.hosts = {host.name: host for host in there}
        held = {m.info.model for m in self.members.values() if m.has_lease and m.info.model}
        self.servable = held | {one.name for host in self.hosts.values() for one in host.models}
        now, known = clock.monotonic(), {name.encode() for name in named}
        self._unnamed = {
            name: self._unnamed.get(name, now) for name in entries if name not in known
        }

    def forget_hosts(self) -> None:
        """Delete the entries of gone hosts that are not needed; only the leader should."""
        kept = {host.name.encode() for host in self.gone if not self._is_forgotten(host)}
        until = clock.monotonic() - HOST_GONE_S
        old = (name for name, since in self._unnamed.items() if since <= until)
        if gone := [name for name in old if name not in kept]:
            self._yard.connection.hdel(self._yard.keys.hosts, *gone)

    def _is_forgotten(self, host: HostInfo) -> bool:
        """Whether it has been gone for so long that its models count as removed."""
        now = clock.monotonic()
        gone_s = now - self._unnamed.get(host.name.encode(), now)
        if host.left_ms:  # an earlier leader has seen it, too
            gone_s = max(gone_s, (self.broker_time.now_ms - host.left_ms) / 1000)
        return bool(self.hosts) and gone_s >= LIST_KEPT_S

    def _offered(self) -> list[ModelInfo]:
        """What hosts may load; of those that are gone, what nobody else announces."""
        hosts = [*self.gone, *(host for _, host in sorted(self.hosts.items()))]
        return [model for host in hosts for model in host.models]

    def _read_loads(self) -> None:
        # No transaction: a server without memory refuses them. So the last event comes first: what
        # leaves a lane in between is counted twice, not missed, and `dispatch` checks the limit.
        pipeline = self._yard.connection.pipeline(transaction=False)
        pipeline.xrevrange(self._yard.keys.capacity, count=1)
        for worker in self.members:
            pipeline.xlen(self._yard.keys.lane(worker))
        last, *loads = pipeline.execute()
        now_ms = self.broker_time.now_ms
        for member, load in zip(self.members.values(), loads, strict=True):
            member.load = load
            member.work = member.work if load else 0
            member.worked_ms = now_ms if load else member.worked_ms
        self._counted = position(last[0][0].decode()) if last else (0, 0)
        self._line_up()

    def _line_up(self) -> None:
        found: dict[str, list[Lane]] = {}
        for worker, member in self.members.items():
            if member.may_serve:
                found.setdefault(member.info.model, []).append(_lane(worker, member))
        self.lanes = {model: Lanes(lanes) for model, lanes in found.items()}

    def _changed(self, worker: str, member: RosterMember) -> None:
        """The content of its lane has changed."""
        member.worked_ms = self.broker_time.now_ms
        self._show(worker, member)

    def _show(self, worker: str, member: RosterMember) -> None:
        if member.may_serve:
            self.lanes[member.info.model].put(_lane(worker, member))

    def weigh(self, worker: str, work: int, event: str) -> None:
        """Set the tokens on a lane, as of that event."""
        member = self.members.get(worker)
        if member:
            member.work, member.weighed = work, position(event)
            self._show(worker, member)

    def add_load(
        self, worker: str, count: int = 1, *, work: int = 0, has_trials: bool = False
    ) -> None:
        """Count entries that came onto a lane; ``has_trials``: suspects on trial among them."""
        member = self.members.get(worker)
        if member:
            member.load += count
            member.work += work
            if has_trials:  # `quarantine` has the entries by now
                member.mark = TO_BE_READ
                self.mark_stale()
            self._changed(worker, member)

    def free(self, worker: str, count: int, event: str, *, work: int | None = None) -> None:
        """Count entries that left a lane, unless they had left it when the loads were read.

        Without ``work`` each counts as much as the average of that lane.
        """
        member, at = self.members.get(worker), position(event)
        if member is None:
            return
        if at > member.weighed:
            left = member.work * count // max(1, member.load) if work is None else work
            member.work = max(0, member.work - left)
        if at > self._counted:
            member.load = max(0, member.load - count)
        self._changed(worker, member)
        if member.is_quarantined:
            self.mark_stale()

    def why_closed(self, model: str) -> str:
        """Why no worker may be given requests for a model, in the past tense."""
        for member in self.members.values():
            if member.has_lease and member.info.model == model and member.run_state != "RUNNING":
                scopes = (ALL, model_scope(model), worker_scope(member.info.name))
                orders = map(self.desired_states.by_scope.get, scopes)
                by = next((f" by {one.by}: {one.why}" for one in orders if one and one.by), "")
                return f"its workers were {member.run_state.lower()}{by}"
        return f"no worker with model {model} was ready" if model else "no worker was ready"

    def worker_order(self) -> Sequence[Lane]:
        """The lanes of all workers with a model, also paused ones, in the order of names."""
        found = ((w, m) for w, m in self.members.items() if m.serves or _is_suspended(m))
        return sorted((_lane(worker, member) for worker, member in found), key=in_turn)

    def joined(self) -> set[str]:
        """Names of the workers that have started as far as they can without a request.

        Where hosts may load several models, that is without a model; also where they are paused.
        """
        everybody = self.members.values()
        return {m.info.name for m in everybody if m.serves or (m.has_lease and self._idles(m))}

    def _idles(self, member: RosterMember) -> bool:
        """Whether it stays as it is until a request, or an operator, needs it."""
        if len(self.servable) > 1 or member.run_state != "RUNNING":
            return member.info.state in ("warm", "asleep", "attached")
        return member.info.state == "attached"

    def bases(self) -> dict[str, str]:
        """The base model of each name, a model's or an adapter's, that workers and hosts report.

        A name that is both a model's and an adapter's is the model's.
        """
        held = [m.info for m in self.members.values() if m.info.model]
        offered = self._offered()
        adapters = [(name, info.model) for info in held for name in info.adapters]
        adapters += [(name, model.name) for model in offered for name in model.adapters]
        models = {info.model for info in held} | {model.name for model in offered}
        return dict(sorted(adapters)) | {model: model for model in models}

    def output_defaults(self) -> dict[str, OutputDefaults]:
        """How much requests may generate that do not say it, by name, where hosts set that."""
        return {
            name: defaults
            for model in self._offered()
            if (defaults := _output_defaults(model)) is not None
            for name in (*model.adapters, model.name)
        }


def _output_defaults(model: ModelInfo) -> OutputDefaults | None:
    """What applies to requests for it that say nothing; None where that is the usual."""
    given = model.serving.sampling if model.serving else {}
    with contextlib.suppress(msgspec.ValidationError):
        found = msgspec.convert(given, OutputDefaults)
        return None if found == OutputDefaults() else found
    return None


def _lane(worker: str, member: RosterMember) -> Lane:
    return Lane(
        worker,
        member.info.name,
        member.info.model,
        member.load,
        member.info.lane_limit,
        member.is_quarantined,
        member.work,
        member.info.max_num_seqs,
        member.mark.is_kept,
    )


def _is_suspended(member: RosterMember) -> bool:
    return member.has_lease and member.run_state == "SUSPENDED" and bool(member.info.model)


def _run_state(info: WorkerInfo, desired_states: DesiredStates) -> RunState:
    """The stricter of the desired and the actual state of a worker.

    It has yet to obey a new signal, and it is not running again before its engine is.
    """
    return max(
        desired_states.of(info.name, info.model).run_state, info.run_state, key=RUN_STATES.index
    )
