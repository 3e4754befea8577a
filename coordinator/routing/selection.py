"""The policy in force: its pure function, its turn, and the schedule that it records."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from coordinator.routing.affinity import NO_MATCH, Matches, megatron, prefix_affinity
from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane, Pick, least_loaded, vllm
from coordinator.routing.prefixes import Cache, Prefixes
from coordinator.routing.queued_request import (
    NO_FEATURES,
    QueuedRequest,
    RoutingFeatures,
    all_features,
)
from coordinator.routing.schedule import ScheduleWriter
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
