"""Counts failed starts of a host's processes and decides when they are enough.

Failures of one kind are counted over all processes of the host, until one of them has been warm
(for failed warm-ups) or has served (for failed loads). A host on which something works continues:
failures there are retried with growing pauses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from worker.host.diagnosis import Diagnosis, FailedStart, Phase, diagnose


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A failure that has happened often enough to be reported."""

    death: FailedStart
    diagnosis: Diagnosis
    count: int
    is_hopeless: bool  # nothing on this host works, and nothing is still in its first try


class StartFailures:
    """The failed starts of one host."""

    def __init__(self, limit: int) -> None:
        """``limit`` failures of the same kind are enough; one where trying again cannot help."""
        self._limit = limit
        self._counts: Counter[tuple[Phase, str]] = Counter()
        self._last: dict[tuple[Phase, str], tuple[FailedStart, Diagnosis]] = {}
        self._worked: set[Phase] = set()
        self._told: set[tuple[Phase, str]] = set()
        self.failed: set[str] = set()  # processes that have had their first try

    def note(self, name: str, death: FailedStart) -> None:
        """The process ``name`` has died or refused its model."""
        diagnosis = diagnose(death)
        kind = death.phase, diagnosis.cause
        self._counts[kind] += 1
        self._last[kind] = death, diagnosis
        self.failed.add(name)

    def worked(self, phase: Phase) -> None:
        """Some process has completed this phase."""
        self._worked.add(phase)

    def enough(self, *, is_pending: bool) -> StartFailure | None:
        """The failure to report now, each kind once; None if there is none.

        While ``is_pending``, a process is still in its first try, which is waited for.
        """
        for kind, count in self._counts.items():
            death, diagnosis = self._last[kind]
            if kind in self._told or not (diagnosis.is_final or count >= self._limit):
                continue
            has_worked = death.phase in self._worked
            if not has_worked and is_pending and not diagnosis.is_final:
                continue
            self._told.add(kind)
            return StartFailure(death, diagnosis, count, is_hopeless=not has_worked)
        return None
