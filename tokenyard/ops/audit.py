"""The audit: what operators have done, with who and why, in a bounded stream.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import decoded
from tokenyard.yard.reads import is_entry

#: The role of those who use the command line.
COMMAND_LINE: Final = "cli"
#: Entries that are kept.
MAX_ENTRIES: Final = 10_000
#: Most characters of each of its texts.
MAX_CHARACTERS: Final = 1_000
_MOST_DETAILS: Final = 20
_details_decoder: Final = msgspec.json.Decoder(dict[str, str])
_TEXTS: Final = ("who", "role", "action", "target", "why", "text", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One action. Nothing in it is secret."""

    who: str
    role: str  # at the board; on the command line `COMMAND_LINE`
    action: str  # "request.cancel"
    target: str  # what it was done to
    why: str = ""  # what the operator gave as the reason
    text: str = ""  # what has happened
    error: str = ""  # why it was refused
    details: Mapping[str, str] = field(default_factory=dict)
    entry: str = ""  # its id in the stream
    at_ms: int = 0  # unix time by the server's clock


def record(yard: Yard, entry: AuditEntry) -> str:
    """Add an entry; its id. Long texts are cut, since some come from clients."""
    details = {_cut(name): _cut(text) for name, text in [*entry.details.items()][:_MOST_DETAILS]}
    packed: dict[Any, Any] = {name: _cut(getattr(entry, name)) for name in _TEXTS}
    packed["details"] = msgspec.json.encode(details)
    added: Any = yard.connection.xadd(yard.keys.audit, packed, maxlen=MAX_ENTRIES, approximate=True)
    return bytes(added).decode()


def read_audit(yard: Yard, most: int = 100, before: str = "") -> Sequence[AuditEntry]:
    """The newest entries, the newest first, older than the entry ``before``."""
    end = f"({before}" if is_entry(before) else "+"
    found: Any = yard.connection.xrevrange(yard.keys.audit, end, count=most)
    return [_read(entry, fields) for entry, fields in found]


def find_entry(yard: Yard, entry: str) -> AuditEntry | None:
    """One entry by its id."""
    if not is_entry(entry):
        return None
    found: Any = yard.connection.xrange(yard.keys.audit, entry, entry)
    return _read(*found[0]) if found else None


def _cut(text: str) -> str:
    """At most `MAX_CHARACTERS`, as Unicode."""
    if len(text) > MAX_CHARACTERS:
        text = f"{text[: MAX_CHARACTERS - 1]}…"
    return text.encode(errors="replace").decode()


def _read(entry: bytes, fields: Mapping[bytes, bytes]) -> AuditEntry:
    texts = {name.decode(errors="replace"): value for name, value in fields.items()}
    return AuditEntry(
        **{name: texts.get(name, b"").decode(errors="replace") for name in _TEXTS},
        details=decoded(texts.get("details", b"{}"), _details_decoder.decode) or {},
        entry=entry.decode(),
        at_ms=int(entry.partition(b"-")[0]),
    )
