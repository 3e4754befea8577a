"""Who goes where in this turn: a pure decision over what waits and the lanes.

Suspects (`coordinator.history`) run alone: for the first of each model the emptiest lanes are kept
free until they have run dry, and nothing else may come onto them while the suspects are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from coordinator.intake import Waiting
from coordinator.policies import Lane

#: Chooses among the lanes of a request's model; None: it has to wait.
Choose = Callable[[Waiting, Sequence[Lane]], Lane | None]


@dataclass(frozen=True, slots=True)
class Placed:
    """A request and the lane chosen for it."""

    waiting: Waiting
    lane: Lane  # as it was found
    alone: bool = False


@dataclass(slots=True)
class Plan:
    """What to do in this turn."""

    placed: list[Placed] = field(default_factory=list)
    late: list[Waiting] = field(default_factory=list)  # past their deadlines
    next_ms: float | None = None  # when a pause or a deadline is over next


class Planner:
    """Makes the plan of one turn."""

    def __init__(
        self,
        lanes: Iterable[Lane],
        *,
        model_of: Callable[[Waiting], str],
        choose: Choose,
        now_ms: float,
        most: int,
        strict_order: bool,
    ) -> None:
        self._lanes: dict[str, list[Lane]] = {}
        for lane in lanes:
            self._lanes.setdefault(lane.model, []).append(lane)
        self._model_of = model_of
        self._choose = choose
        self._now_ms = now_ms
        self._most = most
        self._strict_order = strict_order
        self._plan = Plan()

    def make(self, held: Iterable[Waiting]) -> Plan:
        """Choose lanes for requests, given in the order in which they should be served."""
        ready = [waiting for waiting in held if self._is_ready(waiting)]
        self._place_suspects(waiting for waiting in ready if waiting.is_suspect)
        self._place_others(waiting for waiting in ready if not waiting.is_suspect)
        return self._plan

    def _is_ready(self, waiting: Waiting) -> bool:
        """Whether it may be placed now; notes what is late and what pauses."""
        deadline_ms, not_before_ms = waiting.request.deadline_ms, waiting.history.not_before_ms
        if deadline_ms is not None and deadline_ms <= self._now_ms:
            self._plan.late.append(waiting)
            return False
        if deadline_ms is not None:
            self._wake_at(deadline_ms)
        if not_before_ms > self._now_ms:
            self._wake_at(not_before_ms)
            return False
        return True

    def _wake_at(self, at_ms: float) -> None:
        self._plan.next_ms = min(self._plan.next_ms or at_ms, at_ms)

    def _place_suspects(self, suspects: Iterable[Waiting]) -> None:
        """Keep lanes free for suspects, at most half of those of each model."""
        totals = {model: len(lanes) for model, lanes in self._lanes.items()}
        kept = {
            model: sum(lane.is_quarantined for lane in lanes)
            for model, lanes in self._lanes.items()
        }
        for waiting in suspects:
            model = self._model_of(waiting)
            lanes = self._lanes.get(model, [])
            free = [lane for lane in lanes if not lane.is_quarantined]
            if not free or kept[model] >= max(1, totals[model] // 2):
                continue
            lane = min(free, key=lambda one: one.load)
            lanes.remove(lane)
            kept[model] += 1
            if lane.load == 0:
                self._plan.placed.append(Placed(waiting, lane, alone=True))

    def _place_others(self, others: Iterable[Waiting]) -> None:
        shut: set[str] = set()  # models that have no room in this turn
        for waiting in others:
            if len(self._plan.placed) >= self._most:
                return
            model = self._model_of(waiting)
            lanes = self._lanes.get(model)
            if model in shut:
                continue
            lane = self._choose(waiting, lanes) if lanes else None
            if lanes is None or lane is None:
                shut.add(model)
                if self._strict_order:
                    return
                continue
            lanes[lanes.index(lane)] = replace(lane, load=lane.load + 1)
            self._plan.placed.append(Placed(waiting, lane))
