"""Who goes where in this turn: a pure decision over what waits for a model and its lanes.

Models do not compete for lanes, so each has a plan of its own. Suspects (`coordinator.history`)
run alone: for the first of each model the emptiest lanes are kept free until they have run dry,
and nothing else may come onto them while the suspects are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, islice

from msgspec import Struct
from msgspec.structs import replace

from coordinator.lanes import Lanes
from coordinator.policies import Lane, Pick
from coordinator.waiting import Waiting

#: Chooses among the lanes of a request's model; None: it has to wait.
Choose = Callable[[Waiting, Lanes], Pick | None]

ALONE = "a suspect, alone on an empty lane"


class Placed(Struct, frozen=True):
    """A request and the lane chosen for it."""

    waiting: Waiting
    lane: Lane  # as it was found
    why: str  # there, in words
    alone: bool = False
    match: float | None = None  # see `Pick.match`


def make_plan(
    suspects: Iterable[Waiting],
    others: Iterable[Waiting],
    lanes: Lanes,
    *,
    choose: Choose,
    most: int,
) -> list[Placed]:
    """Choose lanes for requests, given in the order in which they should be served.

    ``lanes`` are those of their model. Of the requests no more are looked at than are placed,
    and one: the first that has to wait holds back those behind it.
    """
    alone, left = _place_suspects(suspects, lanes)
    return alone + _place_others(others, left, choose, most - len(alone))


def _place_suspects(suspects: Iterable[Waiting], lanes: Lanes) -> tuple[list[Placed], Lanes]:
    """Keep lanes free for suspects, at most half of them; what is placed, and the lanes left."""
    rest = iter(suspects)
    first = next(rest, None)
    if first is None:  # nearly always, and then nobody looks at a thousand lanes
        return [], lanes.copy()
    placed: list[Placed] = []
    left = list(lanes)
    kept = sum(lane.is_quarantined for lane in lanes)
    for waiting in chain((first,), rest):
        free = [lane for lane in left if not lane.is_quarantined]
        if not free or kept >= max(1, len(lanes) // 2):
            break
        lane = min(free, key=lambda one: one.load)
        left.remove(lane)
        kept += 1
        if lane.load == 0:
            placed.append(Placed(waiting, lane, ALONE, alone=True))
    return placed, Lanes(left)


def _place_others(
    others: Iterable[Waiting], lanes: Lanes, choose: Choose, most: int
) -> list[Placed]:
    placed: list[Placed] = []
    for waiting in islice(others, max(0, most) if lanes else 0):
        pick = choose(waiting, lanes)
        if pick is None:
            break
        lane, work = pick.lane, pick.lane.work + waiting.hints.work
        lanes.put(replace(lane, load=lane.load + 1, work=work))
        placed.append(Placed(waiting, lane, pick.why, match=pick.match))
    return placed
