"""How long what waits now will wait, if nothing else comes. No I/O.

An estimate by shares: who has more weight is served more at a time, and what one does not need the
others get. It takes all requests for equally long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from tokenyard.admin.line import TenantLine
from tokenyard.protocol.keys import PRIORITY_CLASSES, IntakeClass, PriorityClass

T = TypeVar("T")
#: How classes share, see docs/operations.md, "Who is served first".
CLASS_WEIGHTS: Final[Mapping[PriorityClass, int]] = {"high": 16, "normal": 4, "low": 1}


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
