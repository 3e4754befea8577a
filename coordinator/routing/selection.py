"""The policy in force: its pure function, its turn, and the schedule that it records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from coordinator.routing.absences import Absences
from coordinator.routing.affinity import NO_MATCH, Matches, megatron, prefix_affinity
from coordinator.routing.features import NO_FEATURES, RoutingFeatures, all_features, work_only
from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane, Pick, least_loaded, vllm
from coordinator.routing.prefixes import Cache, Prefixes
from coordinator.routing.queued_request import QueuedRequest
from coordinator.routing.schedule import Replay, ScheduleWriter, read_schedule
from tokenyard.protocol.settings import CoordinatorSettings, PolicyName
from tokenyard.protocol.wire import Request

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
        self._replay: Replay | None = None
        self._writer = ScheduleWriter(settings.record) if settings.record else None
        self._replay_absences = Absences(settings.replay_wait_s)
        self._worker_absences = Absences(math.inf)
        self._last: dict[str, str] = {}  # by model: the worker that was given the last request
        self._prefixes = Prefixes()
        policy = None if settings.deterministic else settings.policy
        self.is_affine = policy in _AFFINE  # it looks for prefixes
        self.is_weighing = policy in _WEIGHING  # it weighs the tokens on the lanes
        self.is_blind = policy in (None, "round_robin")  # it ignores loads
        # Deterministic: the workers of each model, how many requests of each class and model had
        # their turn, and the worker of each waiting request.
        self._worker_order: dict[str, list[str]] = {}
        self._turns: Counter[tuple[str, str]] = Counter()
        self._due: dict[tuple[str, str], str] = {}

    @property
    def record(self) -> ScheduleWriter | None:
        """Where decisions are recorded, if anywhere."""
        return self._writer

    def start(self) -> None:
        """Read the schedule to follow, if there is one."""
        if self._settings.replay:
            self._replay = Replay(read_schedule(self._settings.replay))

    def start_when_complete(self, lanes: Sequence[Lane]) -> None:
        """The expected workers have joined: the deterministic mode uses these, by name."""
        for lane in lanes:
            self._worker_order.setdefault(lane.model, []).append(lane.name)

    def features_of(self, request: Request, fields: Mapping[bytes, bytes]) -> RoutingFeatures:
        """What the policy needs to know of a request, and no more."""
        if self.is_affine:
            return all_features(request, fields)
        return work_only(request) if self.is_weighing else NO_FEATURES

    def follow(self, caches: Mapping[str, Cache]) -> None:
        """The roster was read: forget the prefixes of workers that have left."""
        self._prefixes.follow(caches)

    def note(self, worker: str, features: RoutingFeatures) -> None:
        """A worker was given a request, and so will have its prefix."""
        if self.is_affine:
            self._prefixes.note(worker, features)

    def choose(self, queued: QueuedRequest, lanes: Lanes) -> Pick | None:
        """A lane for the request among those of its model, or None while it has to wait."""
        recorded = self._recorded(queued)
        if not recorded:
            return self._by_rule(queued, lanes)
        if not _is_given_up(recorded, lanes, self._replay_absences):
            return _pick("replay", lanes.named(recorded))
        pick = self._by_rule(queued, lanes)
        return pick and replace(pick, why=f"replay: {recorded} is absent; {pick.why}")

    def _recorded(self, queued: QueuedRequest) -> str:
        """The worker that the replayed schedule names, or ""."""
        return (self._replay and self._replay.worker(queued.client, queued.id)) or ""

    def _by_rule(self, queued: QueuedRequest, lanes: Lanes) -> Pick | None:
        """A lane where no schedule names one."""
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
        _is_given_up(due, lanes, self._worker_absences)  # never, but it logs the absent worker
        return lanes.named(due)

    def settle(self, queued: QueuedRequest, lane: Lane | None) -> None:
        """The request was dispatched to ``lane``, or does not wait any more."""
        if self._due:
            self._due.pop((queued.intake, queued.entry), None)
        if lane is None:
            return
        recorded = self._recorded(queued)
        if self._replay and recorded:
            self._replay.advance(queued.client, queued.id)
        if self._writer:
            instead_of = recorded if recorded != lane.name else ""
            self._writer.write(queued.client, queued.id, lane.name, instead_of)

    def close(self) -> None:
        """Close the record; idempotent."""
        if self._writer:
            self._writer.close()


def _is_given_up(worker: str, lanes: Lanes, absences: Absences) -> bool:
    """Whether a worker that requests must go to has been absent for too long."""
    model = lanes[0].model
    if lanes.has(worker):
        absences.end(worker, model)
        return False
    return absences.is_over(worker, model)


def _pick(policy: str, lane: Lane | None, *, weighs: bool = False) -> Pick | None:
    """A lane with the reason for it, which `tokenyard explain` shows."""
    if lane is None:
        return None
    why = f"{policy}, {_load(lane)}"
    return Pick(lane, f"{why}, {lane.work} tokens" if weighs else why)


def _load(lane: Lane) -> str:
    return f"load {lane.load} of {lane.limit}"
