"""The span of each wait of a request, until it was dispatched or refused."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.routing.queued_request import NO_TRACE, QueuedRequest
from tokenyard.protocol.wire import Request
from tokenyard.telemetry.tracing import Tracer, carrier_of


class QueueSpans:
    """Writes these spans to a tracer, where that is on."""

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
