"""What is read from streams: requests of the intakes, and events."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from tokenyard.protocol.digest import entry_digest

Fields = Mapping[bytes, bytes]


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
    def digest(self) -> str:
        """Distinguishes requests of the same id; a retry needs none, it is in the ledger."""
        return "" if self.intake == "retry" else entry_digest(self.fields)

    @property
    def published(self) -> bytes:
        """Tokens that the readers of a retry have seen, packed."""
        return self.fields.get(b"published", b"") if self.intake == "retry" else b""


class WakeupEvent(Struct, frozen=True):
    """An event of the streams that wake the leader, as it was read."""

    id: str
    fields: Fields
