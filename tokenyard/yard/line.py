"""The tenants that wait, and what share of the tokens each should have and has had.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tokenyard.protocol.keys import (
    CLASS_WEIGHTS,
    PRIORITY_CLASSES,
    TENANTS_WAITING,
    IntakeClass,
    Yard,
    split_intake,
)
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import DEFAULTS, TenantSettings, decode_tenants
from tokenyard.protocol.texts import counted, listed

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
    pipeline.hget(yard.keys.tally, TENANTS_WAITING)
    found, count = pipeline.execute()
    waiting = max(0, whole(count))
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
    had = {
        one.name: max(0.0, one.had - earlier[one.name]) * one.settings.weight
        for one in now.tenants
        if one.name in earlier
    }
    total = sum(had.values())
    return {name: tokens / total for name, tokens in had.items()} if total else {}


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


_MOST_NAMED: Final = 5
#: All requests without a tenant, which share as one.
NO_TENANT: Final = "requests of no tenant"


def turn(line: TenantLine, intake: str, held: Mapping[str, int]) -> str:
    """Why a request is not dispatched yet, by its intake and what each of its tenant's holds."""
    name, tenant = split_intake(intake)
    listed = ", ".join(f"{count} {one}" for one, count in held.items() if count)
    own = f"tenant {tenant} has {sum(held.values())} waiting: {listed}"
    if held.get(name) != sum(held.values()):
        own += f", of which {name} gets its share"
    one = line.of(tenant)
    return own if one is None else f"{own}; {tenant_turn(line, one)}"


def next_turn(line: TenantLine) -> str:
    """Who is served next as far as its model has room, and why; "" where nobody is in line."""
    if not line.tenants:
        return ""
    one = next((one for one in line.tenants if not one.is_at_limit), None)
    if one is None:
        return "each tenant in line runs as many requests as it may (max_running_requests)"
    start = f"{one.name} is served next" if one.name else f"{NO_TENANT} are served next"
    if len(line.tenants) == 1:
        return f"{start}: nobody else waits"
    has = "it has" if one.name else "they have"
    text = f"{start}: of {counted(len(line.tenants), 'tenant')} in line {has} had"
    passed = [other.name for other in line.tenants[: line.tenants.index(one)]]
    if not passed:
        return f"{text} least for its weight"
    return f"{text} least for its weight, but for those at max_running_requests: {_named(passed)}"


def tenant_turn(line: TenantLine, one: InLine) -> str:
    """When a tenant in line is served, and why then."""
    if one.is_at_limit:
        most = one.settings.max_running_requests
        return f"{one.running} of its requests run, and max_running_requests is {most}"
    before = line.before(one.name)
    share = line.wanted.get(one.name)
    part = "" if share is None else f"; its share is {share:.1%}, by weight"
    if not before:
        return f"it is the next of {counted(len(line.tenants), 'tenant')} in line{part}"
    return f"served before it, as they have had less for their weight: {_named(before)}{part}"


def _named(tenants: Sequence[str]) -> str:
    return listed([name or NO_TENANT for name in tenants], _MOST_NAMED)


T = TypeVar("T")


def seconds_by_class(
    waiting: Mapping[IntakeClass, int], rate_per_s: float
) -> dict[IntakeClass, float]:
    """Time until the last request of each class that has any is given to a worker.

    Empty where no rate is known. Retries are served first. It does not hold where tenants wait:
    classes are an order among the requests of one tenant.
    """
    if rate_per_s <= 0:
        return {}
    retries = waiting.get("retry", 0)
    found: dict[IntakeClass, float] = {"retry": retries / rate_per_s} if retries else {}
    amounts = {name: waiting.get(name, 0) for name in PRIORITY_CLASSES}
    for name, seconds in _drained(amounts, CLASS_WEIGHTS, rate_per_s).items():
        found[name] = retries / rate_per_s + seconds
    return found


def seconds_by_tenant(line: TenantLine, counted: int, rate_per_s: float) -> dict[str, float]:
    """The same for the first ``counted`` tenants in line.

    Those behind count as if they always waited. Empty where no rate is known, or the line is too
    long to know the weights.
    """
    if rate_per_s <= 0 or not line.is_whole:
        return {}
    amounts = {one.name: one.waiting for one in line.tenants[:counted] if one.name}
    weights = {one.name: one.settings.weight for one in line.tenants}
    others = sum(weight for name, weight in weights.items() if name not in amounts)
    return _drained(amounts, weights, rate_per_s, others)


def _drained(
    amounts: Mapping[T, int], weights: Mapping[T, float], rate_per_s: float, others: float = 0.0
) -> dict[T, float]:
    """When each has nothing left; ``others`` is the weight of those who never end."""
    turns = sorted((amount / weights[one], one) for one, amount in amounts.items() if amount)
    left = others + sum(weights[one] for _, one in turns)
    found: dict[T, float] = {}
    seconds = service = 0.0
    for until, one in turns:
        seconds += (until - service) * left / rate_per_s
        service = until
        left -= weights[one]
        found[one] = seconds
    return found
