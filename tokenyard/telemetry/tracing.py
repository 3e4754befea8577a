"""Traces from client to engine: each request carries W3C's ``traceparent`` in its metadata.

OpenTelemetry (the extra ``tracing``) is imported only where traces are on. A client uses the
program's own setup. Coordinators and workers set up an exporter of their own, and record each span
after its end, in the trace of its request; requests without a trace have no spans.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.texts import pip_install
from tokenyard.protocol.wire import Request

log = logging.getLogger("tokenyard.telemetry.tracing")

TRACEPARENT: Final = "traceparent"
_STATE: Final = "tracestate"
#: Most bytes that a trace adds to a request; ``tracestate`` has up to 512.
ROOM: Final = 700
#: Either of these variables of OpenTelemetry turns traces on.
_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_STOP_S: Final = 3.0
_NAME: Final = "tokenyard"

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


def carrier_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The trace context in the metadata of a request; empty where it has no valid one."""
    found = {name: metadata.get(name) for name in (TRACEPARENT, _STATE)}
    carried = {name: value for name, value in found.items() if isinstance(value, str)}
    return carried if TRACEPARENT in carried else {}


class Tracer:
    """Exports the spans of one process, if an endpoint is configured."""

    def __init__(self, service: str, instance: str, endpoint: str = "") -> None:
        """``endpoint`` is a URL without path; by default OpenTelemetry's variables apply."""
        self.is_on = False
        self._service = service
        self._instance = instance
        self._endpoint = endpoint
        self._provider: Any = None
        self._tracer: Any = None
        self._extract: Any = None

    def check(self) -> None:
        """Raises `SettingsError` where an endpoint is configured and the extra is missing."""
        if self._endpoint and not _is_installed():
            raise SettingsError([f"otlp_endpoint: needs more: {pip_install('tracing')}"])

    def start(self) -> None:
        """Set up the exporter, if an endpoint is configured; raises like `check`."""
        self.check()
        if not self._endpoint and not any(map(os.environ.get, _VARIABLES)):
            return
        if not _is_installed():  # the variables may be meant for other programs
            log.warning("OTEL_* is set, but no traces are sent: %s", pip_install("tracing"))
            return
        self._set_up()
        self.is_on = True

    def _set_up(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.instance.id": self._instance}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about["service.name"] = self._service
        url = f"{self._endpoint.rstrip('/')}/v1/traces" if self._endpoint else None
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer(_NAME)
        self._extract = TraceContextTextMapPropagator().extract

    def stop(self) -> None:
        """Export the remaining spans, within a few seconds; idempotent."""
        self.is_on = False
        provider, self._provider = self._provider, None
        if provider is not None:
            ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
            ending.start()
            ending.join(_STOP_S)

    def span(
        self,
        name: str,
        carrier: Mapping[str, str],
        start_s: float,
        end_s: float,
        attributes: Attributes,
        *,
        is_consumer: bool = False,
        events: Mapping[str, float] | None = None,
        error: str = "",
    ) -> None:
        """Record a span that has ended, in the trace of ``carrier``, if that has one.

        Times, including those of ``events`` by name, are unix seconds.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span

        context = self._extract(carrier)
        if not self.is_on or not get_current_span(context).get_span_context().is_valid:
            return
        kind = SpanKind.CONSUMER if is_consumer else SpanKind.INTERNAL
        span = self._tracer.start_span(name, context, kind, attributes, start_time=_ns(start_s))
        for event, at_s in (events or {}).items():
            span.add_event(event, timestamp=_ns(at_s))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(end_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class Sending:
    """The spans of requests that a client submits in one call."""

    def __init__(self, api: Any, yard: str) -> None:
        self._api = api
        self._yard = yard
        self._tracer = api.get_tracer(_NAME)
        self._spans: dict[str, Any] = {}  # by request id

    def carry(self, request: Request) -> Request:
        """The request with its trace; one that has a trace already keeps it, without a span."""
        if TRACEPARENT in request.metadata:
            return request
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {
            "messaging.system": _NAME,
            "messaging.operation.type": "send",
            "messaging.destination.name": self._yard,
            "messaging.message.id": request.id,
        }
        if request.model:
            attributes["gen_ai.request.model"] = request.model
        kind = self._api.SpanKind.PRODUCER
        span = self._tracer.start_span(f"send {self._yard}", kind=kind, attributes=attributes)
        self._spans[request.id] = span
        metadata = dict(request.metadata)
        TraceContextTextMapPropagator().inject(metadata, self._api.set_span_in_context(span))
        return msgspec.structs.replace(request, metadata=metadata)

    def end(self, outcomes: Mapping[str, str], error: Exception | None = None) -> None:
        """End the spans, with the outcomes of the requests by id, or the error of the call."""
        spans, self._spans = self._spans, {}
        for request_id, span in spans.items():
            if error is not None:
                span.record_exception(error)
                span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
            elif request_id in outcomes:
                span.set_attribute("tokenyard.submission", outcomes[request_id])
            span.end()


def sending(yard: str) -> Sending | None:
    """The spans for the requests of one submission; None where this program has no traces."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    is_set_up = not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)
    is_traced = api.get_current_span().get_span_context().is_valid
    return Sending(api, yard) if is_set_up or is_traced else None
