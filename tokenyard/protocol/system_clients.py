"""Names of clients that the system makes itself, which therefore no guest may have.

A guest may submit and cancel as every client whose name is its own, or begins with that and a `-`,
and read that client's answers. With the name of one of these it would reach the requests of others.
"""

from __future__ import annotations

from typing import Final

from tokenyard.protocol.wire import DEFAULT_CLIENT

#: Under this name gateways are woken by replies.
GATEWAY_CLIENT: Final = "gateway"
#: A batch job is the client of its requests, by its id.
BATCH_PREFIX: Final = "batch_"
#: A client whose program gives it no name.
UNNAMED_PREFIX: Final = "client-"
_HTTP: Final = "http"
_HTTP_OF: Final = f"{_HTTP}."

#: Whose names these are, and those that begin so.
_NAMES: Final = {
    DEFAULT_CLIENT: "plain entries without a client",
    _HTTP: "requests by a gateway",
    GATEWAY_CLIENT: "gateways",
    "batch": "batch jobs",
    "client": "clients whose program gives no name",
}
_BEGINNINGS: Final = {
    _HTTP_OF: "requests of a tenant by a gateway",
    BATCH_PREFIX: "batch jobs",
    UNNAMED_PREFIX: "clients whose program gives no name",
}


def http_client(tenant: str) -> str:
    """A gateway's client for the requests of a tenant; "" is none."""
    return _HTTP_OF + tenant if tenant else _HTTP


def why_no_guest(name: str) -> str:
    """Why no guest may have a name, as the end of a message; "" where one may."""
    whose = _NAMES.get(name, "") or next(
        (whose for start, whose in _BEGINNINGS.items() if name.startswith(start)), ""
    )
    return whose and f"the system gives such names itself, to {whose}"
