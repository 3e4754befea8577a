"""The HTTP endpoint of a process, for Prometheus and for the probes of a container platform.

`prometheus_client.start_http_server` has no other paths than that of the metrics, so the server is
made here, around the library's own application.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
import wsgiref.simple_server
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tokenyard.protocol.errors import SettingsError, TokenyardError
from tokenyard.protocol.texts import pip_install
from tokenyard.telemetry.health import Health

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

#: Prometheus' text format.
PLAIN: Final = "text/plain; version=0.0.4"
_STOP_S: Final = 5.0
#: What is shown as JSON; it gets the query, and raises `TokenyardError` where it does not know.
Page = Callable[[Mapping[str, str]], Mapping[str, Any]]


class Collector(Protocol):
    """Knows the metrics of a process; called for each scrape, by another thread."""

    def collect(self) -> Iterable[Family]:
        """The metrics as they are now."""


@dataclass(slots=True)
class Endpoint:
    """Serves the metrics and the health of one process at ``http://host:port``, from a thread.

    ``/metrics`` is for Prometheus, ``/livez`` and ``/readyz`` are for probes: status 200 and
    ``ok``, or 503 and the reason. Raises `SettingsError` where the extra is missing.
    """

    collector: Collector | None  # None: there are only probes
    health: Health
    host: str
    port: int
    pages: Mapping[str, Page] = field(default_factory=dict)  # others, by path
    _server: WSGIServer | None = None
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise SettingsError([f"metrics_port: needs more: {pip_install('metrics')}"])

    def start(self) -> None:
        """Start to listen; raises `SettingsError` where that fails."""
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry: Any = CollectorRegistry(auto_describe=False)
        if self.collector:
            registry.register(self.collector)
        application: Any = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            match environ["PATH_INFO"]:
                case "/livez":
                    return _probe_answer(self.health.not_live, start_response)
                case "/readyz":
                    return _probe_answer(self.health.not_ready, start_response)
            if page := self.pages.get(environ["PATH_INFO"]):
                return _page_answer(page, environ["QUERY_STRING"], start_response)
            # In OpenMetrics the library removes the colon from names that are not its own.
            return application({**environ, "HTTP_ACCEPT": PLAIN}, start_response)

        kind = _IPv6Server if ":" in self.host else _Server
        try:
            self._server = wsgiref.simple_server.make_server(
                self.host, self.port, answer, kind, _Handler
            )
        except OSError as error:
            place = f"{self.host}:{self.port}"
            raise SettingsError([f"metrics_port: cannot listen at {place}: {error}"]) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; idempotent."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(_STOP_S)


def _probe_answer(reason: str, start_response: Any) -> list[bytes]:
    """Status 200, or 503 with the reason."""
    status = "503 Service Unavailable" if reason else "200 OK"
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{reason or 'ok'}\n".encode()]


def _page_answer(page: Page, query: str, start_response: Any) -> list[bytes]:
    """Status 200 and JSON, or 503 with the reason."""
    try:
        answer = json.dumps(page(dict(parse_qsl(query))))
    except TokenyardError as error:
        return _probe_answer(str(error), start_response)
    start_response("200 OK", [("Content-Type", "application/json")])
    return [f"{answer}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10  # a silent connection does not keep its thread

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""
