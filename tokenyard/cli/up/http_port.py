"""The port of a local yard's gateway, or of its board."""

from __future__ import annotations

import socket
from typing import Final

import click

DEFAULT_PORT: Final = 8000


def choose_http_port(wanted: int | None) -> int:
    """The wanted port, or 8000, or a free one; raises `click.UsageError` where it is taken."""
    if wanted is None:
        return _free(DEFAULT_PORT) or _free(0)
    port = _free(wanted)
    if not port:
        raise click.UsageError(f"--http-port: {wanted} is taken; give another one, or 0")
    return port


def _free(port: int) -> int:
    """The port if it is free, any for 0; 0 if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
        bound: int = probe.getsockname()[1]
        return bound
