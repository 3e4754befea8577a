"""Addresses on the board of what has an arbitrary name. They lie below the board's root.

A request's id has any characters, so an address holds it quoted.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from tokenyard.board.yard import Parameters
from tokenyard.ops.names import checked_request


def request_address(client: str, request_id: str) -> str:
    """The page of one request."""
    return address("/request", {"client": client, "id": request_id})


def address(path: str, parameters: Mapping[str, object]) -> str:
    """A page with its parameters; empty ones are left out."""
    given = {name: value for name, value in parameters.items() if value not in {"", None}}
    return f"{path}?{urlencode(given, quote_via=quote, safe='')}" if given else path


def given_request(given: Parameters) -> tuple[str, str]:
    """Client and id in the address of a request's page; raises `BadInput`."""
    [client, *_], [request_id, *_] = (given.texts(name) or [""] for name in ("client", "id"))
    return checked_request(client, request_id)
