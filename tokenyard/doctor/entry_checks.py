"""Whether ledgers and streams agree, by what the leader told of its looks and by one of our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tokenyard.doctor.evidence import Evidence
from tokenyard.doctor.finding import Finding, fault, ok, unknown, warning
from tokenyard.protocol.reconciliation import LAST, LAST_FOUND, Pass, parse_pass

_RECENT_MS: Final = 3_600_000
_MOST_NAMED: Final = 5


def check_entries(evidence: Evidence) -> Iterator[Finding]:
    """Requests whose entry somebody has deleted by hand."""
    look = evidence.look
    if look is None:
        return
    handshake, leads = look.view.handshake, look.view.leader is not None
    lost = evidence.lost
    if lost and lost.names:
        named = ", ".join(lost.names[:_MOST_NAMED])
        more = ", ..." if len(lost.names) > _MOST_NAMED else ""
        found = f"{len(lost.names):,} of {lost.ledgers:,} requests have lost their entry"
        todo = "The coordinator ends them as ENTRY_LOST; if not, look into its log."
        if not leads:
            todo = "A coordinator ends them as ENTRY_LOST: start one."
        yield (warning if leads else fault)("entries", f"{found}: {named}{more}", todo)
    ended = _told(handshake, LAST_FOUND)
    is_recent = ended is not None and look.at_ms - ended.at_ms < _RECENT_MS
    if ended and is_recent:
        found = f"{ended.ended:,} requests ended as ENTRY_LOST{_ago(ended, look.at_ms)}"
        todo = "Find who runs XTRIM, XDEL or XADD with MAXLEN on intakes or lanes."
        yield warning("entries", found, todo)
    if not is_recent and not (lost and lost.names):
        yield _all_well(_told(handshake, LAST), look.at_ms, leads=leads)


def _all_well(last: Pass | None, at_ms: int, *, leads: bool) -> Finding:
    if last is None and leads:
        return unknown("entries", "the coordinator has told of no look yet: may its user SCAN?")
    if last is None:
        return unknown("entries", "nobody has looked: no coordinator leads")
    told = f"the coordinator looked at {last.ledgers:,} ledgers in {last.took_s:.1f} s"
    return ok("entries", f"each where its ledger says; {told}{_ago(last, at_ms)}")


def _ago(told: Pass, at_ms: int) -> str:
    return f", {max(0, at_ms - told.at_ms) // 1000:,} s ago"


def _told(handshake: Mapping[str, str], field: str) -> Pass | None:
    return parse_pass(handshake.get(field, ""))
