"""A receiver of spans: OTLP over HTTP, on loopback, kept in memory."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """A received span; ids in hex, times in unix seconds."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: dict[str, float]
    error: str


@dataclass(slots=True)
class Receiver:
    """All received spans."""

    url: str
    spans: list[Span] = field(default_factory=list)

    def of(self, service: str, name: str = "") -> list[Span]:
        """The spans of one service, with one name or any."""
        return [one for one in self.spans if one.service == service and name in {"", one.name}]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Receive spans until the block ends."""
    found: Receiver

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            found.spans.extend(_read(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiver(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def _read(body: bytes) -> Iterator[Span]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _plain(group.resource.attributes).get("service.name", "")
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    service,
                    span.name,
                    type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    _plain(span.attributes),
                    {event.name: event.time_unix_nano / 1e9 for event in span.events},
                    span.status.message,
                )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
