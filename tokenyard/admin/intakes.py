"""Which intakes hold requests.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from tokenyard.protocol.keys import (
    PRIORITY_CLASSES,
    IntakeClass,
    intake_name,
    is_tenant,
)
from tokenyard.protocol.yard import Yard

#: Tenants that are looked at in one round trip.
_PAGE: Final = 1_000


def intakes(yard: Yard, most_tenants: int = sys.maxsize) -> list[tuple[IntakeClass, str]]:
    """Class and name of each intake, of tenants only where something waits; ``retry`` is last.

    Of tenants at most ``most_tenants`` are looked at, the next in line first.
    """
    of_tenants = list(_of_tenants(yard, most_tenants))
    named: list[tuple[IntakeClass, str]] = []
    for priority_class in PRIORITY_CLASSES:
        named.append((priority_class, priority_class))
        named += [one for one in of_tenants if one[0] == priority_class]
    return [*named, ("retry", "retry")]


def _of_tenants(yard: Yard, most: int) -> Iterator[tuple[IntakeClass, str]]:
    run: Any = yard.connection
    for at in range(0, most, _PAGE):
        last = min(at + _PAGE, most) - 1
        page = [raw.decode(errors="replace") for raw in run.zrange(yard.keys.line, at, last)]
        names: list[tuple[IntakeClass, str]] = [
            (priority_class, intake_name(priority_class, tenant))
            for tenant in filter(is_tenant, page)
            for priority_class in PRIORITY_CLASSES
        ]
        pipeline = run.pipeline(transaction=False)
        for _, name in names:
            pipeline.xlen(yard.keys.intake(name))
        lengths = pipeline.execute()
        yield from (name for name, length in zip(names, lengths, strict=True) if length)
        if len(page) < _PAGE:
            return
