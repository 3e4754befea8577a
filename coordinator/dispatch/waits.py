"""What is told of waits: why requests wait, how fast the yard serves, and the span of each wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.routing.queued_request import NO_TRACE, QueuedRequest
from tokenyard.protocol.wire import Request
from tokenyard.telemetry.tracing import Tracer, carrier_of

#: A shorter wait needs no reason.
LEAST_MS: Final = 1000.0
#: Reasons of one model that are remembered, the last ones.
_MOST: Final = 16
#: Of more models, only those are remembered for which something waits: clients may invent names.
_MOST_MODELS: Final = 1000


@dataclass(slots=True)
class _Spell:
    why: str
    since_ms: float
    until_ms: float = math.inf  # it is in force

    def ms_of(self, queued: QueuedRequest, now_ms: float) -> float:
        """How much of the time that a request has waited."""
        return min(self.until_ms, now_ms) - max(self.since_ms, queued.since_ms)


class WaitReasons:
    """Why the requests of each model waited lately: what `explain` tells once they have a lane."""

    def __init__(self) -> None:
        self._spells: dict[str, deque[_Spell]] = {}
        self._before: _Spell | None = None

    def begin(self, now_ms: float) -> None:
        """A turn begins; before the first one, nothing is known."""
        if self._before is None:
            self._before = _Spell("another coordinator led, or none", -math.inf, now_ms)

    def note(self, reasons: Mapping[str, str], now_ms: float) -> None:
        """Why the requests of each model wait now; those of others do not."""
        in_force = {}
        for model, spells in self._spells.items():
            if spells[-1].until_ms == math.inf and reasons.get(model) != spells[-1].why:
                spells[-1].until_ms = now_ms
            in_force[model] = spells[-1].until_ms == math.inf
        for model, why in reasons.items():
            if not in_force.get(model):
                self._spells.setdefault(model, deque(maxlen=_MOST)).append(_Spell(why, now_ms))
        if len(self._spells) > _MOST_MODELS:
            self._spells = {model: self._spells[model] for model in reasons}

    def tell(self, queued: QueuedRequest, now_ms: float, why: str) -> str:
        """Why a request goes to its lane now, and what it waited for most of the time."""
        if self._before is None or now_ms - queued.since_ms < LEAST_MS:
            return why
        # Before its model was known, it waited under that of nobody.
        spells = (self._before, *self._spells.get(queued.model, ()), *self._spells.get("", ()))
        longest = max(spells, key=lambda spell: spell.ms_of(queued, now_ms))
        most_ms = longest.ms_of(queued, now_ms)
        return f"{why}; for {most_ms / 1000:.1f} s {longest.why}" if most_ms > 0 else why


# How fast the yard serves, from which clients get an estimate of their wait.

#: Weight of the newest measurement.
NEWEST = 0.3
#: Shortest time (s) of a measurement.
LEAST_S = 0.5


class ServiceRate:
    """Requests per second while requests had to wait: otherwise it would be their arrival rate."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._count = 0
        self._since = 0.0
        self._always_busy = True

    def count(self, requests: int) -> None:
        """So many were dispatched."""
        self._count += requests

    def note(self, *, busy: bool) -> None:
        """Whether requests wait now."""
        self._always_busy = self._always_busy and busy

    def measure(self, now: float) -> bool:
        """End a measurement, if it is long enough, at ``now`` (s); whether the rate changed."""
        seconds, measured = now - self._since, self._count
        if seconds < LEAST_S:
            return False
        usable = self._always_busy and self._since > 0.0 and measured > 0
        if usable:
            newest = measured / seconds
            old = self.per_s or newest
            self.per_s = NEWEST * newest + (1 - NEWEST) * old
        self._count, self._since, self._always_busy = 0, now, True
        return usable


class QueueSpans:
    """Writes the span of each wait, until the request was dispatched or refused, to a tracer."""

    def __init__(self, tracer: Tracer, yard: str) -> None:
        self._tracer = tracer
        self._yard = yard

    def trace_of(self, request: Request) -> Mapping[str, str]:
        """The trace context to keep while a request waits."""
        return carrier_of(request.metadata) if self._tracer.is_on else NO_TRACE

    def ended(
        self, queued: QueuedRequest, now_ms: float, *, worker: str = "", error: str = ""
    ) -> None:
        """A request was dispatched to ``worker``, or refused with ``error``.

        Times are those of the server, in unix ms.
        """
        if not queued.trace or not self._tracer.is_on:
            return
        attributes: dict[str, str | bool] = {
            "messaging.system": "tokenyard",
            "messaging.destination.name": self._yard,
            "messaging.message.id": queued.id,
            "tokenyard.intake": queued.intake,
            "tokenyard.is_retry": queued.intake == "retry",
            "tokenyard.worker": worker,
            "gen_ai.request.model": queued.model,
        }
        self._tracer.span(
            f"wait {self._yard}",
            queued.trace,
            queued.since_ms / 1000,
            max(queued.since_ms, now_ms) / 1000,
            {name: value for name, value in attributes.items() if value != ""},
            error=error,
        )
