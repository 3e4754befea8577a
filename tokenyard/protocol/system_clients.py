"""Names of clients that the system makes itself."""

from __future__ import annotations

from typing import Final

#: Under this name gateways are woken by replies.
GATEWAY_CLIENT: Final = "gateway"
#: A batch job is the client of its requests, by its id.
BATCH_PREFIX: Final = "batch_"
#: A client whose program gives it no name.
UNNAMED_PREFIX: Final = "client-"


def http_client(tenant: str) -> str:
    """A gateway's client for the requests of a tenant; "" is none."""
    return f"http.{tenant}" if tenant else "http"
