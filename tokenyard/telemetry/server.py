"""The web server of the metrics: a thread for each scrape, and nothing in the log."""

from __future__ import annotations

import socket
import wsgiref.simple_server
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SixServer(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10  # who connects and says nothing keeps no thread

    def log_message(self, *_: Any) -> None:
        """Scrapes come all the time."""


def make_server(host: str, port: int, application: Any) -> WSGIServer:
    """A server that listens, and serves once `serve_forever` is called; raises `OSError`."""
    kind = _SixServer if ":" in host else _Server
    return wsgiref.simple_server.make_server(host, port, application, kind, _Handler)
