"""What a guest writes into its inbox beside requests, and what it is told of each entry.

Coordinator and client share these words; docs/protocol.md, section "Guests", is their public form.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec
from msgspec import Struct

ReceiptCode = Literal["accepted", "known", "full", "late", "reused", "invalid"]

#: Longest text by which a guest tells its receipts apart, in bytes.
MAX_RECEIPT_BYTES: Final = 100
#: Most ids in one entry that says which requests have ended.
MOST_ENDED: Final = 500


class Receipt(Struct, frozen=True, omit_defaults=True, gc=False):
    """What became of an entry of an inbox; it grows by the rules of `tokenyard.protocol.wire`."""

    receipt: str  # as the entry had it
    code: ReceiptCode
    sid: str = ""  # accepted: the server's id
    position: int = 0  # accepted: requests that are served before it
    eta_ms: int = -1  # accepted: their time; late: the time that it would wait
    retry_after_ms: int = 0  # full
    state: str = ""  # known, reused
    message: str = ""  # invalid: the field and what is wrong with it


_decoder = msgspec.json.Decoder(Receipt)


def decode_receipt(text: str) -> Receipt:
    """Read a receipt; raises `msgspec.DecodeError`."""
    return _decoder.decode(text)


def mark_of(yard: str, guest: str) -> str:
    """By which a guest finds itself in the handshake, which does not name the others to it."""
    return hashlib.blake2b(f"{yard} {guest}".encode(), digest_size=8).hexdigest()


def owns(guest: str, client: str) -> bool:
    """Whether a client's name is one of this guest's."""
    return client == guest or client.startswith(f"{guest}-")
