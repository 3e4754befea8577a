"""The body of a new response: what it says to the gateway, and its conversation.

A conversation is a list of items, as vLLM takes it and as clients list it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from gateway.http.errors import GatewayError, invalid
from gateway.http.incoming import with_file_urls

PATH: Final = "/v1/responses"
#: Items of an output that the next turn reads. vLLM leaves earlier reasoning out as well.
_CARRIED: Final = frozenset({"message", "function_call", "custom_tool_call"})

Item = dict[str, Any]
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


# The items of a conversation.


def as_items(given: Any) -> list[Any]:
    """The field ``input`` as a list."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return list(given) if isinstance(given, list) else []


def carried(output: Sequence[Item]) -> list[Item]:
    """The items of an output that belong to the input of the next turn."""
    return [
        {name: value for name, value in item.items() if value is not None}
        for item in output
        if item.get("type") in _CARRIED and item.get("content") != []
    ]


def listed(response_id: str, given: Any) -> list[Item]:
    """The input of a response in the form of OpenAI's list; each item has an id."""
    items = (item for item in as_items(given) if isinstance(item, dict))
    return [_listed(response_id, number, item) for number, item in enumerate(items)]


def _listed(response_id: str, number: int, item: Item) -> Item:
    kind = item.get("type") or "message"
    prefix = "msg" if kind == "message" else "item"
    drawn = blake2b(f"{response_id}/input/{number}".encode(), digest_size=16).hexdigest()
    full = {"id": f"{prefix}_{drawn}", "type": kind, "status": "completed"}
    full |= {name: value for name, value in item.items() if value is not None}
    if kind == "message" and isinstance(full.get("content"), str):
        text = full["content"]
        full["content"] = [
            {"type": "output_text", "text": text, "annotations": []}
            if full.get("role") == "assistant"
            else {"type": "input_text", "text": text}
        ]
    return full
