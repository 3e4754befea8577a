"""Addresses on the board of what has an arbitrary name. They lie below the board's root.

A request's id has any characters, so an address holds it quoted, and a form names the request by a
text of plain ASCII: browsers change control characters and line ends in the fields of a form.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote, urlencode

from tokenyard.board.yard import Parameters
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import is_name
from tokenyard.protocol.wire import MAX_ID_BYTES


def request_address(client: str, request_id: str) -> str:
    """The page of one request."""
    return address("/request", {"client": client, "id": request_id})


def address(path: str, parameters: Mapping[str, object]) -> str:
    """A page with its parameters; empty ones are left out."""
    given = {name: value for name, value in parameters.items() if value not in {"", None}}
    return f"{path}?{urlencode(given, quote_via=quote, safe='')}" if given else path


def request_name(client: str, request_id: str) -> str:
    """A request in the field of a form; `named_request` is the inverse."""
    return f"{client}/{quote(request_id, safe='')}"


def named_request(name: str) -> tuple[str, str]:
    """Client and id of a request by its `request_name`; raises `BadInput`."""
    client, _, quoted = name.strip().partition("/")
    return checked_request(client, unquote(quoted, errors="replace"))


def given_request(given: Parameters) -> tuple[str, str]:
    """Client and id in the address of a request's page; raises `BadInput`."""
    [client, *_], [request_id, *_] = (given.texts(name) or [""] for name in ("client", "id"))
    return checked_request(client, request_id)


def checked_request(client: str, request_id: str) -> tuple[str, str]:
    """Client and id if there can be such a request; raises `BadInput`."""
    if not is_name(client):
        raise BadInput("client: give the name of the request's client")
    if not 0 < len(request_id.encode(errors="replace")) <= MAX_ID_BYTES:
        raise BadInput(f"id: a request's id has 1 to {MAX_ID_BYTES} bytes")
    return client, request_id
