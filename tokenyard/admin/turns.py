"""When a tenant's request is served, in words: its class, a limit, its tenant's share. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tokenyard.admin.line import InLine, TenantLine
from tokenyard.protocol.keys import split_intake
from tokenyard.protocol.texts import counted

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
    names = ", ".join(name or NO_TENANT for name in tenants[:_MOST_NAMED])
    more = f" and {len(tenants) - _MOST_NAMED} more" if len(tenants) > _MOST_NAMED else ""
    return names + more
