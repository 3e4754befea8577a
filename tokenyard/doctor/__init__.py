"""Checks a yard and its broker, with a remedy for each finding.

`evidence` reads, within limits, and changes nothing. The checks in `broker_checks`
and `yard_checks` are pure functions of the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenyard.doctor.broker_checks import BROKER_CHECKS
from tokenyard.doctor.evidence import Evidence, Finding
from tokenyard.doctor.yard_checks import SNAPSHOT_CHECKS, YARD_CHECKS


def diagnose(evidence: Evidence) -> Iterator[Finding]:
    """Run all checks; each yields one or more findings."""
    for check in BROKER_CHECKS:
        yield from check(evidence)
    if evidence.snapshot is None:
        return
    for look in SNAPSHOT_CHECKS:
        yield from look(evidence.snapshot)
    for compare in YARD_CHECKS:
        yield from compare(evidence.snapshot, evidence)
