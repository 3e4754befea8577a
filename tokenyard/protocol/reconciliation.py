"""What the leader tells of its looks for requests whose entry somebody has deleted by hand."""

from __future__ import annotations

from typing import Final

import msgspec

#: Fields of `info`: the last look through all ledgers (told once a minute), and the last that has
#: ended any request.
LAST: Final = "reconciled"
LAST_FOUND: Final = "reconciled_found"


class Pass(msgspec.Struct, frozen=True):
    """One look through all ledgers of the yard. New fields go last, with defaults."""

    at_ms: int  # its end, by the server's clock
    took_s: float
    ledgers: int  # looked at
    ended: int  # requests, as ENTRY_LOST


def encode_pass(told: Pass) -> bytes:
    """As it stands in `info`."""
    return msgspec.json.encode(told)


def parse_pass(text: str) -> Pass | None:
    """Read what anybody may have written; None where it is nothing of the kind."""
    try:
        return msgspec.json.decode(text, type=Pass)
    except msgspec.MsgspecError:
        return None
