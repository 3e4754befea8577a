"""How every program of a yard writes its log.

Ids, models and errors in it were chosen by clients: nothing in a line can end it, move a cursor or
turn the direction of what follows.
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
    """Escapes what is no text in the values of a record, and newlines in them."""

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
    """Text in one line; numbers stay numbers, for formats that want them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float | bytes) or value is None:
        return value
    return printable(str(value))


def start(level: int) -> None:
    """Log to standard error, where nobody has set up anything else."""
    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessFormatter())
    logging.basicConfig(level=level, handlers=[handler])
