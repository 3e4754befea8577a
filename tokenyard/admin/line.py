"""The tenants that wait, and what share of the tokens each should have and has had.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.protocol.keys import PRIORITY_CLASSES, TENANTS_WAITING
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import DEFAULTS, TenantSettings, decode_tenants
from tokenyard.protocol.yard import Yard

#: Tenants that are read; of a longer line the shares are not known.
MOST: Final = 1_000


@dataclass(frozen=True, slots=True)
class InLine:
    """A tenant that has something waiting. Without a name it is all requests of no tenant.

    `waiting`, `running` and `had` are 0 where it is behind the tenants that were counted.
    """

    name: str
    waiting: int
    running: int
    service: float  # who has the least is served next
    had: float  # weighted tokens by weight, ever: service without what rest has added
    settings: TenantSettings = DEFAULTS

    @property
    def is_at_limit(self) -> bool:
        """Whether it may run no more requests now."""
        most = self.settings.max_running_requests
        return bool(most) and self.running >= most


@dataclass(frozen=True, slots=True)
class TenantLine:
    """The tenants that wait, the next one first."""

    tenants: Sequence[InLine] = ()
    waiting: int = 0  # requests of all tenants
    is_whole: bool = True  # False: more than `MOST` wait

    def before(self, tenant: str) -> list[str]:
        """The tenants that are served before this one, the first one first."""
        names = [one.name for one in self.tenants]
        return names[: names.index(tenant)] if tenant in names else names

    def of(self, tenant: str) -> InLine | None:
        """A tenant that waits; None if it does not."""
        return next((one for one in self.tenants if one.name == tenant), None)

    @property
    def wanted(self) -> Mapping[str, float]:
        """The share of each, by weight; empty where not all are known."""
        if not self.is_whole:
            return {}
        total = sum(one.settings.weight for one in self.tenants)
        return {one.name: one.settings.weight / total for one in self.tenants}


NOBODY: Final = TenantLine()


def read_line(yard: Yard, most_counted: int = MOST) -> TenantLine:
    """Read the line; of a yard without tenants in one small round trip.

    Each tenant has a key of its own counts: those of the first ``most_counted`` are read.
    """
    pipeline: Any = yard.connection.pipeline(transaction=False)
    pipeline.zrange(yard.keys.line, 0, MOST, withscores=True)
    pipeline.hmget(yard.keys.tally, *(f"{TENANTS_WAITING}:{name}" for name in PRIORITY_CLASSES))
    found, counts = pipeline.execute()
    waiting = sum(max(0, whole(count)) for count in counts)
    if not found:
        return TenantLine(waiting=waiting)
    scores = {name.decode(errors="replace"): score for name, score in found[:MOST]}
    tenants = _in_line(yard, scores, most_counted)
    return TenantLine(tenants, waiting, len(found) <= MOST)


def shares_between(before: TenantLine, now: TenantLine) -> dict[str, float]:
    """The share of tokens that each has had, of those who waited at both moments.

    Empty where nobody has had any, or the line is too long to know.
    """
    if not (before.is_whole and now.is_whole):
        return {}
    earlier = {one.name: one.had for one in before.tenants}
    had = dict(_had(earlier, now.tenants))
    total = sum(had.values())
    return {name: tokens / total for name, tokens in had.items()} if total else {}


def _had(earlier: Mapping[str, float], tenants: Iterable[InLine]) -> Iterable[tuple[str, float]]:
    for one in tenants:
        if one.name in earlier:
            yield one.name, max(0.0, one.had - earlier[one.name]) * one.settings.weight


def _in_line(yard: Yard, scores: Mapping[str, float], most_counted: int) -> list[InLine]:
    run: Any = yard.connection
    names = list(scores)
    packed = run.hmget(yard.keys.tenants, names)
    settings = decode_tenants(
        {name.encode(): value for name, value in zip(names, packed, strict=True) if value}
    )
    pipeline = run.pipeline(transaction=False)
    for name in names[:most_counted]:
        pipeline.hmget(yard.keys.tenant(name), "waiting", "running", "lifted")
    counted = [
        InLine(
            name=name,
            waiting=max(0, whole(waiting)),
            running=max(0, whole(running)),
            service=scores[name],
            had=scores[name] - _amount(lifted),
            settings=settings.get(name, DEFAULTS),
        )
        for name, (waiting, running, lifted) in zip(names, pipeline.execute(), strict=False)
    ]
    behind = (InLine(name, 0, 0, scores[name], 0.0, settings.get(name, DEFAULTS)) for name in names)
    return [*counted, *itertools.islice(behind, len(counted), None)]


def _amount(raw: bytes | None) -> float:
    """A number of Redis; 0 where there is none."""
    try:
        amount = float(raw or 0)
    except ValueError:
        return 0.0
    return amount if math.isfinite(amount) else 0.0
