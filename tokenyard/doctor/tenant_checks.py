"""Checks of tenants: their settings, and limits that refuse or hold their requests all the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tokenyard.doctor.evidence import Evidence
from tokenyard.doctor.finding import Finding, ok, unknown, warning
from tokenyard.protocol.texts import counted, span
from tokenyard.yard.tenants import TenantView

#: A tenant that is refused so often in an hour or two, and was lately, does not wait as it is told.
_OFTEN: Final = 10
_LATELY_MS: Final = 600_000
#: A tenant at `max_running_requests` whose oldest request has waited so long is held all the time.
_HELD_MS: Final = 600_000
_MOST_NAMED: Final = 5
#: Limits of one request: waiting does not help.
_LASTING: Final = frozenset({"max_tokens", "models", "classes"})


def check_tenants(evidence: Evidence) -> Iterator[Finding]:
    """Settings that cannot be read, and tenants that hit their limits all the time."""
    if evidence.snapshot is None:
        return
    if evidence.tenants is None:
        why = evidence.unseen.get("tenants", "")
        yield unknown("tenants", f"the settings of tenants cannot be seen: {why}")
        return
    problems = 0
    for one in evidence.tenants:
        found = list(_of(one, evidence.snapshot.at_ms, evidence.held_ms.get(one.name, 0)))
        problems += len(found)
        if problems <= _MOST_NAMED:
            yield from found
    if problems > _MOST_NAMED:
        todo = "tokenyard tenants list, and show for each."
        yield warning("tenants", f"{problems:,} such problems in all", todo)
    if not problems:
        yield ok("tenants", f"{counted(len(evidence.tenants), 'tenant')}, none at its limits")


def _of(one: TenantView, now_ms: int, held_ms: int) -> Iterator[Finding]:
    if not one.is_readable:
        found = f"the settings of {one.name} cannot be read: it has weight 1 and no limits"
        yield warning("tenants", found, f"Set them again: tokenyard tenants set {one.name} ...")
    if one.is_held and held_ms >= _HELD_MS:
        found = (
            f"{one.name}: max_running_requests holds {counted(one.waiting, 'request')}, the oldest"
            f" for {span(held_ms)}: {one.running:,} run"
        )
        todo = f"Raise it (tokenyard tenants set {one.name} --max-running-requests ...)"
        yield warning("tenants", found, f"{todo}, or let its clients send less.")
    for limit, count in one.refused_lately.items():
        ago_ms = now_ms - one.refused_ms.get(limit, 0)
        if count >= _OFTEN and ago_ms < _LATELY_MS:
            found = (
                f"{one.name}: {limit} has refused {count:,} requests in this hour and the one"
                f" before, the last {span(ago_ms)} ago"
            )
            flag = f"--{limit.replace('_', '-')}"
            todo = f"Raise it (tokenyard tenants set {one.name} {flag} ...), or let its clients"
            then = "ask for what it allows" if limit in _LASTING else "wait as the refusal says"
            yield warning("tenants", found, f"{todo} {then}.")
