"""What the doctor finds, looked up in the background: it may take seconds, and no page waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import redis

from tokenyard import clock
from tokenyard.broker.connection import translated
from tokenyard.doctor import Evidence, Finding, diagnose, gather
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.yard import Yard

log = logging.getLogger("tokenyard.board")

#: Shortest time between two examinations, and how much longer than one took.
LEAST_S: Final = 60.0
REST: Final = 100.0


@dataclass(frozen=True, slots=True)
class CheckupReport:
    """The last examination."""

    findings: Sequence[Finding]
    ended_s: float  # monotonic
    at_ms: int  # unix time
    took_s: float
    evidence: Evidence | None  # that they go by
    error: str = ""  # why there was none

    @property
    def age_s(self) -> float:
        """How old it is."""
        return clock.monotonic() - self.ended_s


class Checkup:
    """The doctor of one yard, for all who look at it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: threading.Thread | None = None
        self._report: CheckupReport | None = None

    def latest(self, yard: Yard) -> CheckupReport | None:
        """The last report; begins another examination where it is old. None: not yet."""
        with self._lock:
            if self._running is None and self._is_due():
                # It may outlive the board by a moment, and holds nothing but a connection.
                self._running = threading.Thread(
                    target=self._examine, args=(yard,), name="board-doctor", daemon=True
                )
                self._running.start()
            return self._report

    def _is_due(self) -> bool:
        last = self._report
        return last is None or last.age_s >= max(LEAST_S, REST * last.took_s)

    def _examine(self, yard: Yard) -> None:
        began, error = clock.monotonic(), ""
        evidence = self._report.evidence if self._report else None
        findings: Sequence[Finding] = ()
        try:
            with translated(yard.url):
                refused = evidence.refused if evidence else {}
                evidence = gather(yard, refused)
            findings = tuple(diagnose(evidence))
        except TokenyardError as refusal:
            error = str(refusal)
        except Exception:
            log.exception("the doctor has failed")
            error = "it has failed; the board's log says why"
        finally:
            now = clock.monotonic()
            with self._lock:
                self._running = None
                self._report = CheckupReport(
                    findings, now, clock.wall_ms(), now - began, evidence, error
                )


_checkups: WeakKeyDictionary[redis.Redis, Checkup] = WeakKeyDictionary()
_lock: Final = threading.Lock()


def checkup_of(yard: Yard) -> Checkup:
    """The one of this board."""
    with _lock:
        return _checkups.setdefault(yard.connection, Checkup())
