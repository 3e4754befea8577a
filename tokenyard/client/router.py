"""Routes the entries of a client's reply stream to its pending requests; without I/O.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from tokenyard.client.ledger import RequestSnapshot, unknown
from tokenyard.client.pending import PendingRequest
from tokenyard.client.tokenization import LocalText
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.replies import TERMINAL, Reply, decode_replies, decode_reply

Entry = tuple[bytes, Mapping[bytes, bytes]]

#: A request that was silent for this long is looked up in its ledger.
CHECK_AFTER_S: Final = 5.0
#: Time between two rounds of look-ups, and the most requests of one round.
CHECK_EVERY_S: Final = 1.0
MOST_CHECKS: Final = 64
#: Entries that were read are deleted after this time or this many, whichever comes first.
TRIM_EVERY_S: Final = 1.0
TRIM_EVERY_ENTRIES: Final = 500
#: Deltas kept for requests to which the client has not attached yet.
MOST_UNCLAIMED: Final = 10_000

_log = logging.getLogger("tokenyard.client")


class ReplyRouter:
    """Hands each reply to its pending request."""

    def __init__(self, now: float) -> None:
        #: Last entry of the reply stream that was read.
        self.cursor = "0-0"
        #: Whether the entries from before the start have been read.
        self.is_caught_up = False
        # In the order of `PendingRequest.checked_at`.
        self._open: dict[str, PendingRequest] = {}
        self._lost: dict[str, PendingRequest] = {}  # those with a gap in their tokens
        #: Requests from before the start whose replies may still be in the stream.
        self._resumed: list[PendingRequest] = []
        # A restarted client attaches to its requests one by one, while replies to all of them come.
        self._unclaimed: dict[str, list[Reply]] = {}
        self._unclaimed_count = 0
        self._checked_at = now
        self._trimmed_at = now
        self._untrimmed = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is pending and no entry that was read is still to be deleted."""
        return not self._open and not self._untrimmed

    def find(self, request_id: str) -> PendingRequest | None:
        """The pending request with this id."""
        return self._open.get(request_id)

    def open(self, request_id: str, local_text: LocalText | None, now: float) -> PendingRequest:
        """Follow a request; its replies may come before it counts as submitted."""
        pending = PendingRequest(request_id, local_text, now, now)
        self._open[request_id] = pending
        if request_id in self._unclaimed:
            for reply in self._claim(request_id):
                pending.take(reply, now)
            self._classify(pending)
        return pending

    def forget(self, requests: Iterable[PendingRequest], error: TokenyardError) -> None:
        """Stop following requests; waits for them raise ``error``."""
        for pending in requests:
            self._close(pending)
            pending.fail(error)

    def forget_all(self, error: TokenyardError) -> None:
        """`forget` all pending requests."""
        self.forget(list(self._open.values()), error)

    def _close(self, pending: PendingRequest) -> None:
        if self._open.get(pending.id) is pending:
            del self._open[pending.id]
        self._lost.pop(pending.id, None)

    # The reply stream

    def take(self, entries: Sequence[Entry], now: float) -> None:
        """Hand over the replies in some entries of the stream, in order."""
        for entry, fields in entries:
            try:
                replies = decode_replies(fields)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                _log.warning("skipped malformed reply entry %s: %s", entry, error)
                continue
            for reply in replies:
                pending = self._open.get(reply.id)
                if pending is None:
                    self._keep_unclaimed(reply)
                    continue
                pending.take(reply, now)
                self._classify(pending)
        if entries:
            self.cursor = entries[-1][0].decode()
            self._untrimmed += len(entries)

    def _keep_unclaimed(self, reply: Reply) -> None:
        """Keep a delta of a request that is not followed; its result can be read in the ledger."""
        if reply.event == "result":
            self._claim(reply.id)
            return
        if self._unclaimed_count >= MOST_UNCLAIMED:
            self._claim(next(iter(self._unclaimed)))
        self._unclaimed.setdefault(reply.id, []).append(reply)
        self._unclaimed_count += 1

    def _claim(self, request_id: str) -> list[Reply]:
        kept = self._unclaimed.pop(request_id, [])
        self._unclaimed_count -= len(kept)
        return kept

    def _classify(self, pending: PendingRequest) -> None:
        if pending.is_over:
            self._close(pending)
        elif pending.needs_tokens:
            self._lost[pending.id] = pending

    def resume(self, requests: Iterable[PendingRequest]) -> None:
        """Follow requests that were submitted earlier and may have published tokens.

        Until the reply stream has been read from its oldest entry, their tokens are taken from
        there rather than from the ledger, since the stream has the text, too.
        """
        for pending in requests:
            if not self.is_caught_up:
                self._resumed.append(pending)
            elif not pending.published:
                pending.needs_tokens = True

    def catch_up(self) -> None:
        """Note that the stream has been read to its end for the first time.

        Earlier requests without a reply in it may have tokens in their ledgers.
        """
        self.is_caught_up = True
        for pending in self._resumed:
            if not pending.is_over and not pending.published:
                pending.needs_tokens = True
                self._classify(pending)
        self._resumed.clear()

    def trim_from(self, now: float) -> str | None:
        """The first entry id to keep; None where it is not time to delete."""
        if self._untrimmed < TRIM_EVERY_ENTRIES and now - self._trimmed_at < TRIM_EVERY_S:
            return None
        return self.trim_rest(now)

    def trim_rest(self, now: float) -> str | None:
        """The first entry id to keep; None where nothing was read since the last call."""
        if not self._untrimmed:
            return None
        self._untrimmed = 0
        self._trimmed_at = now
        milliseconds, _, count = self.cursor.partition("-")
        return f"{milliseconds}-{int(count) + 1}"

    # The ledger

    def due(self, now: float, *, is_behind: bool) -> list[PendingRequest]:
        """Requests to look up in the ledger now: those with gaps, and those that were long silent.

        While the client is behind in reading the stream, silence means nothing.
        """
        due = list(itertools.islice(self._lost.values(), MOST_CHECKS))
        if now - self._checked_at >= CHECK_EVERY_S and not is_behind:
            self._checked_at = now
            due += self._silent(now)
        return due

    def _silent(self, now: float) -> list[PendingRequest]:
        oldest = list(itertools.islice(self._open.values(), MOST_CHECKS))
        waiting = [each for each in oldest if now - each.checked_at >= CHECK_AFTER_S]
        for pending in waiting:
            pending.checked_at = now
            self._open[pending.id] = self._open.pop(pending.id)  # to the end
        silent = [
            each for each in waiting if each.is_submitted and now - each.heard_at >= CHECK_AFTER_S
        ]
        for pending in silent:
            pending.needs_tokens = True
        return silent

    def settle(
        self, requests: Sequence[PendingRequest], snapshots: Sequence[RequestSnapshot]
    ) -> None:
        """Bring requests up to date from their ledgers."""
        for pending, snapshot in zip(requests, snapshots, strict=True):
            self._lost.pop(pending.id, None)
            pending.digest = pending.digest or snapshot.digest
            self._settle(pending, snapshot)
            self._classify(pending)

    def _settle(self, pending: PendingRequest, snapshot: RequestSnapshot) -> None:
        if not snapshot.state:
            pending.fail(unknown(pending.id))
        elif snapshot.state in TERMINAL and snapshot.result is not None:
            pending.take(decode_reply(snapshot.result), pending.heard_at)
        elif pending.needs_tokens:
            pending.take_published(snapshot.published, snapshot.cached)


def read_entries(answer: Any) -> Sequence[Entry]:
    """The entries in the answer to an XREAD of one stream."""
    if not answer:
        return []
    [(_, entries)] = answer
    return list(entries)
