"""Connects to a process of this host that may not listen yet."""

from __future__ import annotations

from multiprocessing.connection import Client, Connection
from typing import Final

from tokenyard import clock

_RETRY_S: Final = 0.02


def connect(address: str, timeout_s: float) -> Connection:
    """Connect to the Unix socket at ``address``; raises `TimeoutError` if nothing listens there."""
    until = clock.monotonic() + timeout_s
    while True:
        try:
            return Client(address, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if clock.monotonic() > until:
                raise TimeoutError(f"nothing listens at {address}") from error
            clock.sleep(_RETRY_S)
