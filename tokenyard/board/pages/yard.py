"""The yard at a glance, and its last hour."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import redis
from markupsafe import Markup

from tokenyard import clock
from tokenyard.board.charts import COUNT, DURATION, RATE, Line, Unit, chart, duration, number
from tokenyard.board.page import Parameters
from tokenyard.broker.check import server_name
from tokenyard.broker.connection import translated
from tokenyard.doctor import diagnose
from tokenyard.doctor.broker_checks import check_server, durability_grades
from tokenyard.doctor.evidence import Evidence, Finding, Verdict, gather, glance
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.leader_reports import HistorySample
from tokenyard.telemetry.metrics import quantile_s
from tokenyard.telemetry.queues import read_oldest_ms
from tokenyard.yard.history import HOUR_MS, by_time, joined, lately, read_history, recent_errors
from tokenyard.yard.letters import dead_letters
from tokenyard.yard.line import read_line, seconds_by_class, seconds_by_tenant
from tokenyard.yard.pauses import all_pauses
from tokenyard.yard.snapshot import YardView, read_standbys, read_yard

log = logging.getLogger("tokenyard.board")

#: Time between two points of a chart.
_STEP_MS: Final = 30_000
#: Tenants of the line whose counts are read, and of these the ones that are shown.
_COUNTED: Final = 100
_MOST_TENANTS: Final = 10
_MOST_ERRORS: Final = 10
_MOST_FINDINGS: Final = 30


def view_yard(yard: Yard, given: Parameters) -> dict[str, Any]:
    """The yard at a glance."""
    del given
    view = read_yard(yard, counts_lanes=False)
    samples = read_history(yard, view.at_ms)
    line = read_line(yard, _COUNTED)
    serves = any(one.is_serving for one in view.workers)
    rate = _rate(view) if serves else 0.0
    letters = dead_letters(yard, _MOST_ERRORS) if view.dead else []
    checkup = checkup_of(yard).latest(yard)
    evidence = glance(yard, checkup.evidence if checkup else None)
    return {
        "view": view,
        "pauses": [one.text(0) for one in all_pauses(view.desired_states)],
        "now": lately(samples, view.at_ms),
        "hour": joined(samples),
        "charts": _charts(by_time(samples, view.at_ms, _STEP_MS)),
        "quantile": _quantile,
        "number": number,
        "living": len(view.living),
        "oldest_ms": read_oldest_ms(yard, view.at_ms),
        # Classes are an order among the requests of one tenant.
        "expected_s": {} if line.waiting else seconds_by_class(view.waiting, rate),
        "rate": rate,
        "serves": serves,
        "line": line,
        # Those with most waiting, of the first in line.
        "tenants": sorted(line.tenants[:_COUNTED], key=lambda one: (-one.waiting, one.name))[
            :_MOST_TENANTS
        ],
        "shares": line.wanted,
        "tenant_expected_s": seconds_by_tenant(line, _COUNTED, rate),
        "errors": recent_errors(view, letters)[:_MOST_ERRORS],
        "standbys": read_standbys(yard, view.leader, view.at_ms),
        "server": _server(evidence.info),
        "server_findings": list(check_server(evidence)),
        "grades": list(durability_grades(evidence)),
        "report": checkup,
        "report_minutes": int(checkup.age_s // 60) if checkup else 0,
        "findings": [] if checkup is None else _worst(checkup.findings),
        "tones": _TONES,
    }


def _server(info: Mapping[str, str] | None) -> dict[str, Any]:
    """What INFO says of the broker; empty where it is refused."""
    if info is None:
        return {}
    numbers = ("used_memory", "maxmemory", "connected_clients")
    return {"name": server_name(info), **{name: int(info.get(name, 0) or 0) for name in numbers}}


def _rate(view: YardView) -> float:
    """Requests per second that the leader has measured while requests had to wait."""
    try:
        return max(0.0, float(view.handshake.get("rate", "0")))
    except ValueError:
        return 0.0


def _quantile(counts: Sequence[int], share: float) -> str:
    seconds = quantile_s(counts, share)
    return "-" if seconds is None else duration(seconds)


def _charts(points: Sequence[HistorySample | None]) -> list[Markup]:
    def line(name: str, value: Callable[[HistorySample], float | None]) -> Line:
        return name, [None if one is None else value(one) for one in points]

    def quantiles(times: Callable[[HistorySample], Sequence[int]]) -> list[Line]:
        return [
            line("p50", lambda one: quantile_s(times(one), 0.5)),
            line("p99", lambda one: quantile_s(times(one), 0.99)),
        ]

    shown: Sequence[tuple[str, str, Sequence[Line], Unit]] = (
        (
            "requests",
            "Requests",
            [line("ended", lambda one: one.requests_per_s), line("failed", _failed_per_s)],
            RATE,
        ),
        ("tokens", "Tokens", [line("generated", lambda one: one.tokens_per_s)], RATE),
        ("ttft", "Time to the first token", quantiles(lambda one: one.ttft), DURATION),
        ("wait", "Wait in the queue", quantiles(lambda one: one.wait), DURATION),
        (
            "queue",
            "Requests in the yard",
            [
                line("waiting", lambda one: sum(one.waiting.values())),
                line("running", lambda one: one.running),
            ],
            COUNT,
        ),
        (
            "workers",
            "Workers",
            [line("live", lambda one: one.workers), line("ready", lambda one: one.ready)],
            COUNT,
        ),
    )
    minutes = HOUR_MS // 60_000
    return [chart(name, title, lines, unit, minutes) for name, title, lines, unit in shown]


def _failed_per_s(one: HistorySample) -> float:
    return one.failed / one.seconds if one.seconds else 0.0


#: The look of a verdict, the worst first.
_TONES: Final[Mapping[Verdict, str]] = {
    "fault": "bad",
    "warning": "warn",
    "unknown": "",
    "ok": "good",
}


def _worst(findings: Sequence[Finding]) -> list[Finding]:
    """What there is to do, the worst first."""
    found = [one for one in findings if one.verdict != "ok"]
    return sorted(found, key=lambda one: list(_TONES).index(one.verdict))[:_MOST_FINDINGS]


# What the doctor finds, looked up in the background: it may take seconds, and no page waits.

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
