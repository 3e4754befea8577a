"""Which worker gets the next request: pure functions of the lanes.

A policy gets the candidates and returns one of them, or None if the request has to wait. It does no
I/O, reads no clock and has no state beside the turn that it is given. Policies that use prefixes
are in `coordinator.routing.affinity`; docs/routing.md explains all of them with their formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct


class Lane(Struct, frozen=True, gc=False):
    """A worker as a policy sees it."""

    worker: str
    name: str  # without the incarnation
    model: str
    load: int  # entries on the lane
    limit: int  # most entries
    is_quarantined: bool = False  # suspects are on trial there
    work: int = 0  # tokens of those entries (`Request.work`), where the policy uses them
    max_num_seqs: int = 1  # how many of them the engine runs at once
    is_kept: bool = False  # reserved for more suspects; the earlier ones have survived

    @property
    def room(self) -> int:
        """How many more requests fit."""
        return 0 if self.is_quarantined or self.load >= self.limit else self.limit - self.load

    @property
    def idle(self) -> int:
        """How many more requests the engine could run at once."""
        return max(0, min(self.max_num_seqs, self.limit) - self.load)

    @property
    def is_open(self) -> bool:
        """Whether one more request fits."""
        return self.room > 0

    @property
    def fill(self) -> float:
        """How full it is: 0 empty, 1 full."""
        return self.load / self.limit


class Pick(Struct, frozen=True):
    """A lane, and the reason for it in words."""

    lane: Lane
    why: str
    #: The part of the prompt that was there, from 0 to 1; None for policies without prefixes.
    match: float | None = None


def least_loaded(lanes: Sequence[Lane], last: str) -> Lane | None:
    """The open lane with the smallest share of all dispatched requests and of all their tokens.

    Requests take places and tokens take time; each counts as its part of the sum over the lanes, so
    that neither needs a unit. Shares are relative to lane limits, so a worker of twice the size
    gets twice as many.
    """
    requests = tokens = 0.0
    for lane in lanes:
        requests += lane.load / lane.limit
        tokens += lane.work / lane.limit
    each, every = 1 / (requests or 1.0), 1 / (tokens or 1.0)
    return least(lanes, last, lambda lane: (lane.load * each + lane.work * every) / lane.limit)


def vllm(lanes: Sequence[Lane], last: str) -> Lane | None:
    """The open lane with the least 4 x waiting + running, as vLLM's data parallel client does.

    Requests beyond `max_num_seqs` are waiting. For comparison (vLLM, `DPLBAsyncMPClient`).
    """
    return least(lanes, last, lambda lane: lane.load + 3 * max(0, lane.load - lane.max_num_seqs))


def least(lanes: Sequence[Lane], last: str, cost: Callable[[Lane], float]) -> Lane | None:
    """The open lane with the least cost; of equal ones the next behind the worker named ``last``.

    One pass without a list: there may be a thousand lanes, and this runs for each request.
    """
    best, found = math.inf, None
    best_before, found_before = math.inf, None
    for lane in lanes:
        if lane.load >= lane.limit or lane.is_quarantined:
            continue
        price = cost(lane)
        if lane.name > last:
            if price < best:
                best, found = price, lane
        elif price < best_before:
            best_before, found_before = price, lane
    return found_before if best_before < best else found
