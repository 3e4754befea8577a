"""The policy in force: its pure function, its turn, and the schedule that is recorded."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import (
    NO_MATCH,
    Lane,
    Matches,
    Pick,
    least_loaded,
    megatron,
    prefix_affinity,
    vllm,
)
from coordinator.routing.prefixes import Cache, Prefixes
from coordinator.routing.queued_request import (
    NO_FEATURES,
    QueuedRequest,
    RoutingFeatures,
    all_features,
)
from tokenyard.protocol.control import Command
from tokenyard.protocol.settings import CoordinatorSettings, PolicyName
from tokenyard.protocol.wire import Request

log = logging.getLogger("tokenyard.coordinator.schedule")

#: Policies that use only the lanes.
_PLAIN: Final[Mapping[PolicyName, Callable[[Lanes, str], Lane | None]]] = {
    "round_robin": Lanes.next_open,
    "least_loaded": least_loaded,
    "vllm": vllm,
}
#: Policies that look for prefixes.
_AFFINE: Final[Mapping[PolicyName, Callable[[Sequence[Lane], str, Matches], Pick | None]]] = {
    "prefix_affinity": prefix_affinity,
    "megatron": megatron,
}
#: Policies that weigh the tokens on the lanes.
_WEIGHING: Final[frozenset[PolicyName]] = frozenset({"least_loaded", "prefix_affinity"})


class Selection:
    """Chooses lanes by the settings, and records the choices that were carried out."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        #: Where decisions are recorded, if anywhere.
        self.record = ScheduleWriter(settings.record) if settings.record else None
        self._last: dict[str, str] = {}  # by model: the worker that was given the last request
        self._prefixes = Prefixes()
        policy = None if settings.deterministic else settings.policy
        self.is_affine = policy in _AFFINE  # it looks for prefixes
        self.is_weighing = policy in _WEIGHING  # it weighs the tokens on the lanes
        self.is_blind = policy in (None, "round_robin")  # it ignores loads
        # Deterministic: the workers of each model, how many requests of each class and model had
        # their turn, the worker of each waiting request, and the absent ones, by worker and model.
        self._worker_order: dict[str, list[str]] = {}
        self._turns: Counter[tuple[str, str]] = Counter()
        self._due: dict[tuple[str, str], str] = {}
        self._absent: set[tuple[str, str]] = set()

    def start_when_complete(self, lanes: Sequence[Lane]) -> None:
        """The expected workers have joined: the deterministic mode uses these, by name."""
        for lane in lanes:
            self._worker_order.setdefault(lane.model, []).append(lane.name)

    def features_of(self, request: Request, fields: Mapping[bytes, bytes]) -> RoutingFeatures:
        """What the policy needs to know of a request, and no more."""
        if self.is_affine:
            return all_features(request, fields)
        return RoutingFeatures(request.work) if self.is_weighing else NO_FEATURES

    def follow(self, caches: Mapping[str, Cache]) -> None:
        """The roster was read: forget the prefixes of workers that have left."""
        self._prefixes.follow(caches)

    def note(self, worker: str, features: RoutingFeatures) -> None:
        """A worker was given a request, and so will have its prefix."""
        if self.is_affine:
            self._prefixes.note(worker, features)

    def choose(self, queued: QueuedRequest, lanes: Lanes) -> Pick | None:
        """A lane for the request among those of its model, or None while it has to wait."""
        if self._settings.deterministic:
            return _pick("deterministic", self._in_turn(queued, lanes))
        pick = self._by_policy(queued.features, lanes)
        if pick:
            self._last[pick.lane.model] = pick.lane.name
            self.note(pick.lane.worker, queued.features)
        return pick

    def _by_policy(self, features: RoutingFeatures, lanes: Lanes) -> Pick | None:
        policy, last = self._settings.policy, self._last.get(lanes[0].model, "")
        if policy in _PLAIN:
            return _pick(policy, _PLAIN[policy](lanes, last), weighs=self.is_weighing)
        matches = self._prefixes.matches((lane.worker for lane in lanes), features)
        pick = _AFFINE[policy](lanes, last, matches)
        if pick is None:
            return None
        lane, match = pick.lane, matches.get(pick.lane.worker, NO_MATCH)
        return Pick(lane, f"{policy}, {pick.why}, {_load(lane)}", match.known)

    def _in_turn(self, queued: QueuedRequest, lanes: Lanes) -> Lane | None:
        """Entry k of a class belongs to worker k modulo the workers.

        Also while that worker is full or absent: timing must not change the order.
        """
        key = (queued.intake, queued.entry)
        if key not in self._due:
            model = lanes[0].model
            names = self._worker_order.setdefault(model, [lane.name for lane in lanes])
            self._due[key] = names[self._turns[queued.intake, model] % len(names)]
            self._turns[queued.intake, model] += 1
        due = self._due[key]
        self._note_presence(due, lanes)
        return lanes.named(due)

    def _note_presence(self, worker: str, lanes: Lanes) -> None:
        """Log once that a worker whose turn it is is absent, and that it is back."""
        model = lanes[0].model
        if lanes.has(worker):
            if (worker, model) in self._absent:
                self._absent.discard((worker, model))
                log.info("worker %s serves %s again", worker, model)
        elif (worker, model) not in self._absent:
            self._absent.add((worker, model))
            log.warning(
                "no worker %s serves %s: its requests, and those behind them, wait for it",
                *(worker, model),
            )

    def settle(self, queued: QueuedRequest, lane: Lane | None) -> None:
        """The request was dispatched to ``lane``, or does not wait any more."""
        if self._due:
            self._due.pop((queued.intake, queued.entry), None)
        if lane and self.record:
            self.record.write(queued.client, queued.id, lane.name)

    def close(self) -> None:
        """Close the record; idempotent."""
        if self.record:
            self.record.close()


def _pick(policy: str, lane: Lane | None, *, weighs: bool = False) -> Pick | None:
    """A lane with the reason for it, which `tokenyard explain` shows."""
    if lane is None:
        return None
    why = f"{policy}, {_load(lane)}"
    return Pick(lane, f"{why}, {lane.work} tokens" if weighs else why)


def _load(lane: Lane) -> str:
    return f"load {lane.load} of {lane.limit}"


# A record of decisions that can be compared.
#
# One JSON object a line, with the worker by name (incarnations differ between runs). Most lines
# assign a request to a worker; those with ``place`` command a worker to load a model. The two are
# numbered separately: the order of requests is reproducible, the moment of a load is not.


class Decision(Struct, frozen=True, omit_defaults=True):
    """One assignment."""

    n: int
    client: str
    id: str
    worker: str


class Placing(Struct, frozen=True, omit_defaults=True):
    """One command to load a model."""

    n: int
    place: str  # the verb
    worker: str
    model: str
    why: str
    devices: list[int] = msgspec.field(default_factory=list)  # of a group


class ScheduleWriter:
    """Appends decisions to a file, each flushed immediately."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._decisions = itertools.count()
        self._placings = itertools.count()

    def write(self, client: str, request_id: str, worker: str) -> None:
        """Record one assignment, in the order of dispatch."""
        self._append(Decision(next(self._decisions), client, request_id, worker))

    def write_placing(self, command: Command, worker: str) -> None:
        """Record the command to a worker, given by name, to load a model."""
        n, devices = next(self._placings), command.devices
        self._append(Placing(n, command.verb, worker, command.model, command.why, devices))

    def _append(self, line: Decision | Placing) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file:
            self._file.close()
            self._file = None
