"""Receipts: the answers to the entries of a guest's inbox.

docs/protocol.md, section "Guests", is the public form of this file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Final, Literal

import msgspec
from msgspec import Struct

ReceiptCode = Literal["accepted", "known", "full", "late", "reused", "invalid"]

#: Longest name of a receipt, in bytes.
MAX_RECEIPT_BYTES: Final = 100
#: Most ids in one entry that reports ended requests.
MOST_ENDED: Final = 500


class Receipt(Struct, frozen=True, omit_defaults=True, gc=False):
    """The outcome of an inbox entry; it grows by the rules of `tokenyard.protocol.wire`."""

    receipt: str  # its name in the entry
    code: ReceiptCode
    sid: str = ""  # accepted: the server's id
    position: int = 0  # accepted: requests to be served before it
    eta_ms: int = -1  # accepted: their estimated time; late: that of its own wait
    retry_after_ms: int = 0  # full
    state: str = ""  # known, reused
    message: str = ""  # invalid: the field and the error
    limit: str = ""  # full, invalid: of the guest's tenant, where that is the reason


_decoder = msgspec.json.Decoder(Receipt)


def decode_receipt(text: str) -> Receipt:
    """Read a receipt; raises `msgspec.DecodeError`."""
    return _decoder.decode(text)


def mark_of(yard: str, guest: str) -> str:
    """A guest's mark in the handshake, which does not reveal the names of other guests."""
    return hashlib.blake2b(f"{yard} {guest}".encode(), digest_size=8).hexdigest()


def owner_of(client: str, guests: Collection[str]) -> str:
    """Another guest that may use this name, too, and so read its replies; "" if there is none."""
    ends = (at for at, letter in enumerate(client) if letter == "-")
    return next((client[:at] for at in ends if client[:at] in guests), "")


def owns(guest: str, client: str) -> bool:
    """Whether a guest may use a client name."""
    return client == guest or client.startswith(f"{guest}-")
