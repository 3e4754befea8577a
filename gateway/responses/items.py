"""Input items: a conversation as vLLM takes it, and as clients list it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from gateway.http.errors import invalid

#: Items of an output that the next turn reads. vLLM leaves earlier reasoning out as well.
_CARRIED: Final = frozenset({"message", "function_call", "custom_tool_call"})
_MOST: Final = 100
_USUAL: Final = 20

Item = dict[str, Any]


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


def page(items: list[Item], query: Mapping[str, str], *bounds: int) -> Item:
    """One page of a list, see `cut`; raises `GatewayError`."""
    return as_list(*cut(items, query, *bounds))


def cut(
    items: list[Item], query: Mapping[str, str], usual: int = _USUAL, most: int = _MOST
) -> tuple[list[Item], bool]:
    """The items of a page, and whether there are more; raises `GatewayError`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "give `asc` or `desc`")
    limit = number_in(query, "limit", usual)
    if not 1 <= limit <= most:
        raise invalid("limit", f"give 1 to {most}")
    ordered = items if order == "asc" else items[::-1]
    if "after" in query:
        ids = [item["id"] for item in ordered]
        if query["after"] not in ids:
            raise invalid("after", "there is no such item")
        ordered = ordered[ids.index(query["after"]) + 1 :]
    return ordered[:limit], len(ordered) > limit


def as_list(data: list[Item], has_more: bool) -> Item:
    """The list object of OpenAI's API."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def number_in(query: Mapping[str, str], name: str, default: int) -> int:
    """A number that is not negative; raises `GatewayError`."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise invalid(name, "give a number that is not negative")
    return int(text)


def is_true(query: Mapping[str, str], name: str) -> bool:
    """A truth value; raises `GatewayError`."""
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise invalid(name, "give `true` or `false`")
    return text in ("true", "1")
