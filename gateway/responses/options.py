"""What the body of a new response says to the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.http.errors import GatewayError, invalid
from gateway.http.incoming import with_file_urls

PATH: Final = "/v1/responses"

Dumps = Callable[..., str]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The fields that vLLM's front end leaves to the gateway."""

    is_background: bool
    is_stream: bool
    #: Whether the response can be asked for again.
    is_kept: bool
    #: The id of the response that this one goes on from.
    previous: str | None


def read_options(body: Mapping[str, Any]) -> ResponseOptions:
    """Read them; raises `GatewayError`, also for what would have no effect."""
    if body.get("conversation") is not None:
        raise invalid("conversation", "not supported; use `previous_response_id`")
    options = ResponseOptions(
        is_background=_flag(body, "background", default=False),
        is_stream=_flag(body, "stream", default=False),
        is_kept=_flag(body, "store", default=True),
        previous=body.get("previous_response_id"),
    )
    if options.is_background and not options.is_kept:
        raise invalid("background", "needs `store`")
    if options.previous is not None:
        if not isinstance(options.previous, str):
            raise invalid("previous_response_id", "give the id of a response")
        if body.get("previous_input_messages"):
            raise invalid("previous_response_id", "not together with `previous_input_messages`")
        if not isinstance(body.get("input"), str | list):
            raise invalid("input", "give a text or a list of items")
    return options


def for_front_end(
    body: Mapping[str, Any], response_id: str, options: ResponseOptions, dumps: Dumps = json.dumps
) -> bytes:
    """The body that vLLM gets; raises `GatewayError` where it cannot be written as JSON."""
    inner = {name: value for name, value in body.items() if name != "previous_response_id"}
    # A response in the background is always written as events: its beginning is the answer to
    # its POST, and any client may follow it later.
    inner |= {"request_id": response_id, "background": False}
    inner["input"] = with_file_urls(inner.get("input"))
    inner["stream"] = options.is_stream or options.is_background
    try:
        text = dumps(inner, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (ValueError, RecursionError) as error:
        message = f"the body is not JSON in UTF-8: {error}"
        raise GatewayError(400, message) from error


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(name, "give `true` or `false`")
    return value
