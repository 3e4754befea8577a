"""What is read from streams: requests of the intakes, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from tokenyard.protocol.digest import entry_digest
from tokenyard.protocol.wire import SYSTEM_FIELDS

Fields = Mapping[bytes, bytes]
#: The id before all entries of a stream.
BEGIN: Final = "0-0"
#: An entry as the server gives it: its id, then names and values in turn.
RawEntry = tuple[bytes, Sequence[bytes]]


def pairs(values: Sequence[bytes]) -> Fields:
    """The fields of a `RawEntry`; the last one of a name counts."""
    return dict(zip(values[::2], values[1::2], strict=True))


class Entry(Struct, frozen=True):
    """An entry of the intake as it was read."""

    intake: str  # see `tokenyard.protocol.keys.intake_name`
    id: str
    fields: Fields

    @property
    def is_retry(self) -> bool:
        """Whether it was on a worker before; only the system writes such entries."""
        return self.intake == "retry"

    @property
    def size(self) -> int:
        """Bytes as its client gave it, without the fields that the system added."""
        fields = self.fields
        size = sum(map(len, fields)) + sum(map(len, fields.values()))
        if self.is_retry:
            added = SYSTEM_FIELDS & fields.keys()
            size -= sum(len(name) + len(fields[name]) for name in added)
        return size

    @property
    def digest(self) -> str:
        """Distinguishes requests of the same id; a retry needs none, it is in the ledger."""
        return "" if self.intake == "retry" else entry_digest(self.fields)

    @property
    def published(self) -> bytes:
        """Tokens that the readers of a retry have seen, packed."""
        return self.fields.get(b"published", b"") if self.intake == "retry" else b""
