"""The leader's report of its scans for requests whose entry was deleted by hand."""

from __future__ import annotations

from typing import Final

import msgspec

#: Fields of `info`: the last scan of all ledgers (written once a minute), and the last one that has
#: ended a request.
LAST: Final = "reconciled"
LAST_FOUND: Final = "reconciled_found"


class Pass(msgspec.Struct, frozen=True):
    """One scan of all ledgers of the yard. New fields come last, with defaults."""

    at_ms: int  # its end, by the server's clock
    took_s: float
    ledgers: int  # that were read
    ended: int  # requests, as ENTRY_LOST


def encode_pass(scan: Pass) -> bytes:
    """The JSON for `info`."""
    return msgspec.json.encode(scan)


def parse_pass(text: str) -> Pass | None:
    """Read an untrusted value; None where it is not valid."""
    try:
        return msgspec.json.decode(text, type=Pass)
    except msgspec.MsgspecError:
        return None
