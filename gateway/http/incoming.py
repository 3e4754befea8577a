"""What comes with a request: its body, which is given to vLLM's app again, and its headers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from gateway.http.errors import GatewayError, invalid

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
#: Headers of a request that its inner one has as its own.
_REPLACED: Final = (b"content-length", b"content-type", b"x-request-id")

#: Longest time that a client may give.
_MOST_MS: Final = 10**10
_MOST_DIGITS: Final = len(str(_MOST_MS))


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body; raises `GatewayError` where it is too large or the client is gone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GatewayError(499, "invalid_request_error", "the client disconnected")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise GatewayError(
                413, "invalid_request_error", f"the body has more than {limit} bytes"
            )
        if not message.get("more_body", False):
            return b"".join(parts)


def require_json(headers: Headers) -> None:
    """Raises `GatewayError`, as vLLM's server does: a page may send other types to other sites."""
    kind = headers.get("content-type", "").lower().split(";", maxsplit=1)[0]
    if kind != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise GatewayError(400, "invalid_request_error", message)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; raises `GatewayError`."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise GatewayError(
            400, "invalid_request_error", f"the body is not JSON: {error}"
        ) from error
    if not isinstance(body, dict):
        raise GatewayError(400, "invalid_request_error", "the body is not a JSON object")
    if _SURROGATE.search(raw) is not None and not _is_unicode(body):
        raise GatewayError(400, "invalid_request_error", "a text in the body is not Unicode")
    return body


def refuse_beam_search(body: dict[str, Any]) -> None:
    """Raises `GatewayError`: each token of each beam would be a request that nobody resumes."""
    if body.get("use_beam_search") not in (None, False):
        raise invalid("use_beam_search", "beam search is not supported")


def _is_unicode(body: dict[str, Any]) -> bool:
    """JSON may escape half of a surrogate pair, which nobody behind the gateway could write."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def replay(raw: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then what the connection brings."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return again


def inner_scope(path: str, durable_id: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Scope:
    """The scope of a POST to vLLM's app that no client sent in this form."""
    kept = [one for one in headers if one[0] not in _REPLACED]
    own = [(b"content-type", b"application/json"), (b"x-request-id", durable_id.encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*kept, *own],
        "client": None,
        "server": None,
    }


def read_event_id(text: str) -> tuple[str, int]:
    """Durable id and number of an event; raises `GatewayError`."""
    name, _, number = text.partition(":")
    if len(name) != 32 or not number.isascii() or not number.isdecimal() or len(number) > 9:
        raise invalid("Last-Event-ID", "this is not the id of an event of this server")
    return name, int(number)


def read_choice(headers: Headers, name: str, usual: str, other: str) -> str:
    """One of two values of a header; raises `GatewayError`."""
    given = headers.get(name, usual)
    if given not in (usual, other):
        message = f"{name}: give `{usual}` or `{other}`"
        raise GatewayError(400, "invalid_request_error", message, param=name)
    return given


def read_deadline(headers: Headers, body: dict[str, Any], now_ms: float) -> int | None:
    """Unix ms by the broker after which the answer is of no use; raises `GatewayError`.

    The header counts in milliseconds, the field ``timeout`` of the body in seconds.
    """
    given = headers.get("x-request-timeout-ms")
    if given is not None:
        # Python refuses to read thousands of digits.
        is_number = given.isascii() and given.isdecimal() and len(given) <= _MOST_DIGITS
        if not is_number or not 0 < int(given) <= _MOST_MS:
            raise invalid("X-Request-Timeout-Ms", f"give 1 to {_MOST_MS:,} milliseconds")
        return int(now_ms) + int(given)
    seconds = body.get("timeout")
    if seconds is None:
        return None
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds * 1000 <= _MOST_MS:
        raise invalid("timeout", f"give seconds, at most {_MOST_MS // 1000:,}")
    return int(now_ms) + math.ceil(float(seconds) * 1000)
