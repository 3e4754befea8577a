"""The scripts with which the leader reads the inboxes of guests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from tokenyard.protocol.replies import Reply, encode_reply
from tokenyard.protocol.wire import MAX_FIELDS, ReplyKind
from tokenyard.scripts.calls import Arg, Caller

#: Most fields of an entry beside those of a request.
MORE_FIELDS: Final = 20
#: How long a guest can read the receipt of an entry.
RECEIPT_TTL_S: Final = 30


class Haul(Struct, frozen=True):
    """The contents of an inbox."""

    #: Size in bytes of an inbox that was deleted unread, else 0.
    overrun: int
    #: Number of entries that were deleted because of their size or number of fields.
    deleted: int
    entries: Sequence[tuple[str, Mapping[bytes, bytes]]]


class Notice(Struct, frozen=True):
    """A reply to a guest from the coordinator."""

    client: str
    kind: ReplyKind
    reply: Reply


class InboxScripts(Caller):
    """Neither checks the leader's token: `submit` detects a repeated id."""

    def collect(
        self, guests: Sequence[str], *, most_memory: int, most_bytes: int, most_entries: int
    ) -> list[Haul]:
        """Read the first entries of some inboxes; they stay there until `settle`."""
        keys = [self.keys.inbox(guest) for guest in guests]
        args: list[Arg] = [most_memory, most_bytes, MAX_FIELDS + MORE_FIELDS, most_entries]
        return [_haul(*found) for found in self._run("collect", keys, args)]

    def settle(self, guest: str, entries: Sequence[str], notices: Sequence[Notice]) -> int:
        """Delete entries of an inbox and publish their replies; returns how many were there."""
        keys = [self.keys.inbox(guest)]
        args: list[Arg] = [self._reply_maxlen, RECEIPT_TTL_S, len(entries), *entries]
        for notice in notices:
            is_frame = notice.kind == "frame"
            name = notice.client
            keys.append(
                self.keys.replies(name) if is_frame else self.keys.reply(name, notice.reply.id)
            )
            args += [notice.kind, encode_reply(notice.reply)]
        taken: int = self._run("settle", keys, args)
        return taken


def _haul(overrun: int, deleted: int, found: Sequence[tuple[bytes, Sequence[bytes]]]) -> Haul:
    entries = [
        (entry.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for entry, fields in found
    ]
    return Haul(overrun, deleted, entries)
