"""JSON that somebody else wrote: whatever is wrong with it is one error."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class BadJson(ValueError):
    """Bytes are not the JSON expected; the message says how, and the cause is msgspec's error."""


class ForeignJson(Generic[T]):
    """Decodes JSON of one type. Thousands of nested arrays are no more than bad JSON."""

    def __init__(self, kind: Any = Any) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def decode(self, raw: bytes | str) -> T:
        """The value; raises `BadJson`."""
        try:
            value: T = self._decode(raw)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise BadJson(str(error)) from error
        return value
