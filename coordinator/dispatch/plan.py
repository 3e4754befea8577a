"""Which requests go to which lanes in this turn: a pure decision for one model.

Models do not compete for lanes, so each has a plan of its own. Suspects
(`coordinator.routing.suspicion`) are tried in groups, or alone, on lanes that take nothing else
meanwhile: empty ones, and those where an earlier group has survived. Where there is none, the
emptiest gets no other requests until it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile

from msgspec import Struct
from msgspec.structs import replace

from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane, Pick
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.texts import counted

#: Chooses among the lanes of a request's model; None: the request has to wait.
Choose = Callable[[QueuedRequest, Lanes], Pick | None]

ALONE = "a suspect, alone on an empty lane"


class PlannedDispatch(Struct, frozen=True):
    """A request and the lane chosen for it."""

    queued: QueuedRequest
    lane: Lane  # before this plan
    why: str  # this lane, in words
    alone: bool = False
    match: float | None = None  # see `Pick.match`
    on_trial: bool = False  # with the others of this plan on its lane


def make_plan(
    suspects: Iterable[QueuedRequest],
    others: Iterable[QueuedRequest],
    lanes: Lanes,
    *,
    choose: Choose,
    most: int,
    trial_share: float = 0.5,
) -> list[PlannedDispatch]:
    """Choose lanes for requests, given in the order in which they should be served.

    ``lanes`` are those of their model; at most ``trial_share`` of them, and at least one, are used
    for suspects. The first of the others that has to wait holds back those behind it.
    """
    queue = list(suspects)
    tried, left = _place_suspects(queue, lanes, trial_share)
    if queue and not tried and len(lanes) == 1 and not lanes[0].is_quarantined:
        # The only lane must become empty for a suspect: requests from before its crash go first.
        since_ms = min(one.since_ms for one in queue)
        left, others = lanes.copy(), takewhile(lambda one: one.since_ms < since_ms, others)
    return tried + _place_others(others, left, choose, most - len(tried))


def _place_suspects(
    suspects: Sequence[QueuedRequest], lanes: Lanes, share: float
) -> tuple[list[PlannedDispatch], Lanes]:
    """The trials that begin now, and the lanes that are left for others."""
    if not suspects:  # nearly always, so that a thousand lanes need not be read
        return [], lanes.copy()
    in_groups = [one for one in suspects if one.trial]
    alone = [one for one in suspects if not one.trial]
    placed: list[PlannedDispatch] = []
    left = [lane for lane in lanes if not lane.is_quarantined]
    kept = len(lanes) - len(left)
    most = max(1, int(len(lanes) * share))
    while in_groups and kept < most and left:
        lane = _for_group(left)
        group = take_group(in_groups, lane.idle) if lane else []
        placed += _on_trial(group, lane) if lane else []
        left.remove(lane or _emptiest(left))
        kept += 1
        if not group:
            break
    while alone and kept < most and left:
        lane = _emptiest(left)
        left.remove(lane)
        kept += 1
        if lane.load == 0:
            placed.append(PlannedDispatch(alone.pop(0), lane, ALONE, alone=True))
    if len(lanes) > 1:
        left = [lane for lane in left if not lane.is_kept]
    return placed, Lanes(left)


def take_group(suspects: list[QueuedRequest], room: int) -> list[QueuedRequest]:
    """Take out the next group of suspects, which are tried together on one lane.

    It is no larger than ``room``, and than the ``trial`` of any member: the size of the largest
    group in which that one may be tried.
    """
    count, limit = 0, room
    for one in suspects:
        limit = min(limit, one.trial or 0)
        if count >= limit:
            break
        count += 1
    group = suspects[:count]
    del suspects[:count]
    return group


def _for_group(lanes: Sequence[Lane]) -> Lane | None:
    """The lane with the most idle places among those that are empty or have survived a trial."""
    fit = [lane for lane in lanes if lane.load == 0 or lane.is_kept]
    return max(fit, key=lambda lane: lane.idle, default=None)


def _emptiest(lanes: Sequence[Lane]) -> Lane:
    return min(lanes, key=lambda lane: lane.load)


def _on_trial(group: Sequence[QueuedRequest], lane: Lane) -> list[PlannedDispatch]:
    others = counted(len(group) - 1, "other suspect")
    return [PlannedDispatch(one, lane, f"on trial with {others}", on_trial=True) for one in group]


def _place_others(
    others: Iterable[QueuedRequest], lanes: Lanes, choose: Choose, most: int
) -> list[PlannedDispatch]:
    placed: list[PlannedDispatch] = []
    for queued in islice(others, max(0, most) if lanes else 0):
        pick = choose(queued, lanes)
        if pick is None:
            break
        lane, work = pick.lane, pick.lane.work + queued.features.work
        lanes.put(replace(lane, load=lane.load + 1, work=work))
        placed.append(PlannedDispatch(queued, lane, pick.why, match=pick.match))
    return placed
