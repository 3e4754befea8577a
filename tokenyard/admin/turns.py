"""When a tenant's request is served, in words: its class, a limit, its tenant's share. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenyard.admin.line import InLine, TenantLine
from tokenyard.protocol.keys import split_intake
from tokenyard.protocol.texts import counted

_MOST_NAMED: Final = 5


def turn(line: TenantLine, intake: str, held: Mapping[str, int]) -> str:
    """Why a request is not dispatched yet, by its intake and what each of its tenant's holds."""
    name, tenant = split_intake(intake)
    listed = ", ".join(f"{count} {one}" for one, count in held.items() if count)
    own = f"tenant {tenant} has {sum(held.values())} waiting: {listed}"
    if held.get(name) != sum(held.values()):
        own += f", of which {name} gets its share"
    one = line.of(tenant)
    if one is None:
        return own
    if one.is_at_limit:
        most = one.settings.max_running_requests
        return f"{own}; {one.running} of its requests run, and max_running_requests is {most}"
    return f"{own}; {_turn(line, one)}"


def _turn(line: TenantLine, one: InLine) -> str:
    """When a tenant is served, and why then."""
    before = line.before(one.name)
    share = line.wanted.get(one.name)
    part = "" if share is None else f"; its share is {share:.1%}, by weight"
    if not before:
        return f"it is the next of {counted(len(line.tenants), 'tenant')} in line{part}"
    names = ", ".join(name or "requests of no tenant" for name in before[:_MOST_NAMED])
    more = f" and {len(before) - _MOST_NAMED} more" if len(before) > _MOST_NAMED else ""
    return f"served before it, as they have had less for their weight: {names}{more}{part}"
