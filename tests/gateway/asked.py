"""Requests that several tests make."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field

PLACE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "description": "The weather",
        "parameters": PLACE,
    },
}
OTHER_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "strict": True,
        "description": "The time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 6}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
#: A call whose argument is long enough for a kill to land inside.
LONG_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "write",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 250, "maxLength": 250}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
NAMED: Final = {"type": "function", "function": {"name": "get_weather"}}


def say(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


class Place(BaseModel):
    """`PLACE`, for SDKs that parse."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]
