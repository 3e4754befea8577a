"""Which worker gets the next request: pure functions of the lanes.

A policy gets the candidates and returns one of them, or None if the request has to wait. It does no
I/O, reads no clock and has no state beside the turn that it is given. Some send a request to a
worker whose cache may still have its prefix; known prefixes and sessions are passed to them as
`Match`es. A match is a guess: the engine may have evicted the prefix. docs/routing.md explains all
policies with their formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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


# Policies that look for prefixes.

#: How much a match counts beside free capacity (Megatron Core's default).
ALPHA: Final = 0.5
#: Prefixes do not count while the loads of the workers differ by more requests than this, and by
#: more than this ratio (the guard of the SGLang router).
LOPSIDED_REQUESTS: Final = 64
LOPSIDED_RATIO: Final = 1.5
#: A prefix counts only on lanes with at most a quarter, or four, more requests than the emptiest:
#: otherwise the longest prefix draws everything to one worker (sglang issue 32195).
NEAR_RATIO: Final = 1.25
NEAR_REQUESTS: Final = 4
#: Less than this of a prompt is no match: it is a common beginning, and soon everywhere.
LEAST_MATCH: Final = 0.3
#: The match of a worker that had the last request of the session, unless a longer prefix is known.
SESSION_MATCH: Final = 0.5


@dataclass(frozen=True, slots=True)
class Match:
    """What a worker probably has of a request."""

    blocks: int = 0  # of its prompt, from the first without a gap
    of: int = 0  # all blocks of its prompt
    recency: int = 0  # of the last of them: larger is later
    has_session: bool = False  # the last request of its session went there

    @property
    def share(self) -> float:
        """Its value for a policy: from 0 (nothing) to 1 (the whole prompt)."""
        return max(self.known, SESSION_MATCH) if self.has_session else self.known

    @property
    def known(self) -> float:
        """The part of its prompt that is there, from 0 to 1."""
        return self.blocks / self.of if self.of else 0.0

    def __str__(self) -> str:
        blocks = f"{self.blocks} of {self.of} blocks of its prompt were there"
        if not self.has_session:
            return blocks
        return f"its session was there, {blocks}" if self.blocks else "its session was there"


NO_MATCH: Final = Match()
Matches = Mapping[str, Match]  # by worker, where there is any


def prefix_affinity(lanes: Sequence[Lane], last: str, matches: Matches) -> Pick | None:
    """The lane with the largest ALPHA x match + (1 - ALPHA) x free capacity, of the emptier ones.

    Without a match among those, and while the load is lopsided, it is `least_loaded`.
    """
    matching = {worker for worker, match in matches.items() if match.share >= LEAST_MATCH}
    if not matching:
        return _least_loaded(lanes, last, "no worker has its prefix")
    if is_lopsided(lanes):
        return _least_loaded(lanes, last, "the load is lopsided")
    emptiest = min((lane.load for lane in lanes if lane.is_open), default=0)
    most = max(emptiest + NEAR_REQUESTS, NEAR_RATIO * emptiest)
    near = [lane for lane in lanes if lane.load <= most]
    if not any(lane.worker in matching and lane.is_open for lane in near):
        return _least_loaded(lanes, last, "the worker with its prefix is busier")
    lane = least(near, last, lambda lane: -score(lane, matches))
    return _matched(lane, matches)


def megatron(lanes: Sequence[Lane], last: str, matches: Matches) -> Pick | None:
    """The open lane with the best score, however full: Megatron Core's rule, for comparison.

    Ties go to the latest match, then to the first name. Without a match the lane with the fewest
    requests is taken. (Megatron-LM, `DataParallelInferenceCoordinator`, ``longest_prefix``.)
    """
    del last  # it takes no turns
    open_lanes = [lane for lane in lanes if lane.is_open]
    if not open_lanes:
        return None
    if not matches:
        return Pick(min(open_lanes, key=lambda lane: lane.load), "no worker has its prefix")

    def rank(lane: Lane) -> tuple[float, int]:
        return score(lane, matches), matches.get(lane.worker, NO_MATCH).recency

    return _matched(max(open_lanes, key=rank), matches)


def score(lane: Lane, matches: Matches) -> float:
    """ALPHA x match + (1 - ALPHA) x free capacity; both from 0 to 1."""
    match = matches.get(lane.worker, NO_MATCH)
    return ALPHA * match.share + (1 - ALPHA) * (1 - lane.fill)


def is_lopsided(lanes: Sequence[Lane]) -> bool:
    """Whether the loads differ so much that evening them out comes first."""
    loads = [lane.load for lane in lanes]
    most, least = max(loads, default=0), min(loads, default=0)
    return most - least > LOPSIDED_REQUESTS and most > LOPSIDED_RATIO * least


def _matched(lane: Lane | None, matches: Matches) -> Pick | None:
    if lane is None:
        return None
    return Pick(lane, str(matches.get(lane.worker, "an emptier lane than that with its prefix")))


def _least_loaded(lanes: Sequence[Lane], last: str, reason: str) -> Pick | None:
    lane = least_loaded(lanes, last)
    return Pick(lane, f"least_loaded since {reason}") if lane else None
