"""The log format of all programs.

Clients choose the ids, models and error texts in it, so control characters are escaped: no value
can start a line, move the cursor or change the direction of text.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Final

from tokenyard.protocol.texts import harmless, printable

#: The one form that `tokenyard up` reads.
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class HarmlessFormatter(logging.Formatter):
    """Escapes control characters and newlines in the values of a record."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The record as text; a traceback keeps its lines."""
        shown = copy.copy(record)
        if isinstance(record.args, tuple):
            shown.args = tuple(map(_value, record.args))
        elif isinstance(record.args, Mapping):
            shown.args = {name: _value(value) for name, value in record.args.items()}
        return harmless(super().format(shown))


def _value(value: Any) -> Any:
    """Text in one line; numbers stay numbers, for formats that need them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float | bytes) or value is None:
        return value
    return printable(str(value))


def start(level: int) -> None:
    """Log to standard error, unless logging is configured already."""
    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessFormatter())
    logging.basicConfig(level=level, handlers=[handler])
