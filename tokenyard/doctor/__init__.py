"""Whether a yard and its broker are set up well: what was found, and what to do about it.

`evidence` reads, within bounds, and changes nothing; the checks are pure functions of what it
has read, those of the broker in `broker_checks`, those of the yard in `yard_checks` and
`entry_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenyard.doctor.broker_checks import BROKER_CHECKS
from tokenyard.doctor.entry_checks import check_entries
from tokenyard.doctor.evidence import Evidence, gather
from tokenyard.doctor.finding import Finding, Verdict
from tokenyard.doctor.yard_checks import YARD_CHECKS

__all__ = ["Evidence", "Finding", "Verdict", "diagnose", "gather"]


def diagnose(evidence: Evidence) -> Iterator[Finding]:
    """What all checks say, one or more findings for each."""
    for check in (*BROKER_CHECKS, *YARD_CHECKS, check_entries):
        yield from check(evidence)
