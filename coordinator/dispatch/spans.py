"""The span of each time that a request has waited, until a worker or a refusal ended that."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.routing.queued_request import NOTHING, QueuedRequest
from tokenyard.protocol.wire import Request
from tokenyard.telemetry.tracing import Tracer, carrier_of


class QueueSpans:
    """Tells a tracer of what has waited; where that is off, nothing happens."""

    def __init__(self, tracer: Tracer, yard: str) -> None:
        self._tracer = tracer
        self._yard = yard

    def trace_of(self, request: Request) -> Mapping[str, str]:
        """What to keep of a request that waits."""
        return carrier_of(request.metadata) if self._tracer.is_on else NOTHING

    def ended(
        self, queued: QueuedRequest, now_ms: float, *, worker: str = "", error: str = ""
    ) -> None:
        """A request waits no longer: it was given to ``worker``, or answered with ``error``.

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
