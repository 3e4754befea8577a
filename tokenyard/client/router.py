"""All requests of one client that are under way, and its place in the stream of their replies.

No I/O here: `tokenyard.client.core` brings what Redis answers. Times are seconds of one monotonic
clock.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from tokenyard.client.ledger import Snapshot, unknown
from tokenyard.client.pending import PendingRequest
from tokenyard.client.tokenization import LocalText
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.receipts import Receipt, decode_receipt
from tokenyard.protocol.replies import TERMINAL, Reply, decode_replies, decode_reply

Entry = tuple[bytes, Mapping[bytes, bytes]]

#: A request that was silent for so long is looked up in its ledger.
CHECK_AFTER_S: Final = 5.0
#: Time between two rounds of such look-ups, and how many requests one may look up.
CHECK_EVERY_S: Final = 1.0
MOST_CHECKS: Final = 64
#: Read entries are deleted after this time or this many, whichever comes first.
TRIM_EVERY_S: Final = 1.0
TRIM_EVERY_ENTRIES: Final = 500
#: Deltas kept for requests that nobody has attached to yet.
MOST_UNCLAIMED: Final = 10_000

_log = logging.getLogger("tokenyard.client.sync")


class ReplyRouter:
    """Hands replies to the exchanges they belong to."""

    def __init__(self, now: float) -> None:
        #: Last entry of the reply stream that was handed over.
        self.cursor = "0-0"
        #: Whether everything that lay in the stream at the start has been read.
        self.is_caught_up = False
        # In the order of `PendingRequest.checked_at`: the start is what waits longest for a look.
        self._open: dict[str, PendingRequest] = {}
        self._lost: dict[str, PendingRequest] = {}  # those that need their tokens at once
        self._resumed: list[
            PendingRequest
        ] = []  # those from before that may be in the stream's past
        # A client that comes back attaches to one request after the other, while the replies to
        # all of them come at once.
        self._unclaimed: dict[str, list[Reply]] = {}
        self._unclaimed_count = 0
        #: What became of a guest's entries, by what these were told apart; those it waits for.
        self._receipts: dict[str, Receipt | None] = {}
        self._checked_at = now
        self._trimmed_at = now
        self._untrimmed = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way, and nothing that was read is still to be deleted."""
        return not self._open and not self._untrimmed

    def find(self, request_id: str) -> PendingRequest | None:
        """The exchange under way for a request."""
        return self._open.get(request_id)

    def open(self, request_id: str, local_text: LocalText | None, now: float) -> PendingRequest:
        """Follow a request from now on; its replies may come before it counts as submitted."""
        exchange = PendingRequest(request_id, local_text, now)
        self._open[request_id] = exchange
        if request_id in self._unclaimed:
            for reply in self._claim(request_id):
                exchange.take(reply, now)
            self._sort(exchange)
        return exchange

    def forget(self, exchanges: Iterable[PendingRequest], fault: TokenyardError) -> None:
        """Follow them no longer; whoever waits for them gets ``fault``."""
        for exchange in exchanges:
            self._close(exchange)
            exchange.fail(fault)

    def forget_all(self, fault: TokenyardError) -> None:
        """`forget` for all that are under way."""
        self.forget(list(self._open.values()), fault)

    def _close(self, exchange: PendingRequest) -> None:
        if self._open.get(exchange.id) is exchange:
            del self._open[exchange.id]
        self._lost.pop(exchange.id, None)

    # The reply stream

    def take(self, entries: Sequence[Entry], now: float) -> None:
        """Hand over the replies in some entries of the stream, in their order."""
        for entry, fields in entries:
            try:
                replies = decode_replies(fields)
            except (msgspec.DecodeError, UnicodeDecodeError) as fault:
                _log.warning("skipped reply entry %s, which is malformed: %s", entry, fault)
                continue
            for reply in replies:
                if reply.event == "receipt":
                    self._take_receipt(reply)
                    continue
                exchange = self._open.get(reply.id)
                if exchange is None:
                    self._keep(reply)
                    continue
                exchange.take(reply, now)
                self._sort(exchange)
        if entries:
            self.cursor = entries[-1][0].decode()
            self._untrimmed += len(entries)

    def _take_receipt(self, reply: Reply) -> None:
        """Keep it where it is waited for; the first one counts."""
        try:
            receipt = decode_receipt(reply.receipt or "")
        except msgspec.DecodeError as fault:
            _log.warning("skipped a receipt, which is malformed: %s", fault)
            return
        if receipt.receipt in self._receipts and self._receipts[receipt.receipt] is None:
            self._receipts[receipt.receipt] = receipt

    def expect(self, receipts: Iterable[str]) -> None:
        """Keep these receipts when they come."""
        self._receipts.update(dict.fromkeys(receipts))

    def receipts(self, wanted: Iterable[str]) -> list[Receipt] | None:
        """These receipts; None until all of them are there."""
        found = [self._receipts.get(name) for name in wanted]
        return None if None in found else [one for one in found if one is not None]

    def expect_no_more(self, receipts: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        for name in receipts:
            self._receipts.pop(name, None)

    def _keep(self, reply: Reply) -> None:
        """Keep a delta that nobody asked for yet; a result can be had from the ledger."""
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

    def _sort(self, exchange: PendingRequest) -> None:
        if exchange.is_over:
            self._close(exchange)
        elif exchange.needs_tokens:
            self._lost[exchange.id] = exchange

    def resume(self, exchanges: Iterable[PendingRequest]) -> None:
        """These were submitted earlier: some of their tokens may have been published.

        Until the reply stream has been read from its oldest entry, tokens are better taken from
        there than from the ledger, since text comes with them.
        """
        for exchange in exchanges:
            if not self.is_caught_up:
                self._resumed.append(exchange)
            elif not exchange.published:
                exchange.needs_tokens = True

    def catch_up(self) -> None:
        """The stream has been read to its end for the first time.

        Requests from before that it said nothing of may have tokens all the same.
        """
        self.is_caught_up = True
        for exchange in self._resumed:
            if not exchange.is_over and not exchange.published:
                exchange.needs_tokens = True
                self._sort(exchange)
        self._resumed.clear()

    def trim_from(self, now: float) -> str | None:
        """First entry id to keep, where it is time to delete what was read."""
        if not self._untrimmed:
            return None
        if self._untrimmed < TRIM_EVERY_ENTRIES and now - self._trimmed_at < TRIM_EVERY_S:
            return None
        return self.trim_rest(now)

    def trim_rest(self, now: float) -> str | None:
        """First entry id to keep, at once; None where nothing was read since the last time."""
        if not self._untrimmed:
            return None
        self._untrimmed = 0
        self._trimmed_at = now
        milliseconds, _, count = self.cursor.partition("-")
        return f"{milliseconds}-{int(count) + 1}"

    # The ledger

    def due(self, now: float, *, is_behind: bool) -> list[PendingRequest]:
        """Requests to look up in the ledger now: those with holes, and those long silent.

        While the client is behind with its reading, silence means nothing.
        """
        due = list(itertools.islice(self._lost.values(), MOST_CHECKS))
        if now - self._checked_at >= CHECK_EVERY_S and not is_behind:
            self._checked_at = now
            due += self._silent(now)
        return due

    def _silent(self, now: float) -> list[PendingRequest]:
        oldest = list(itertools.islice(self._open.values(), MOST_CHECKS))
        waiting = [each for each in oldest if now - each.checked_at >= CHECK_AFTER_S]
        for exchange in waiting:
            exchange.checked_at = now
            self._open[exchange.id] = self._open.pop(exchange.id)  # to the end
        silent = [
            each for each in waiting if each.is_submitted and now - each.heard_at >= CHECK_AFTER_S
        ]
        for exchange in silent:
            exchange.needs_tokens = True
        return silent

    def settle(self, exchanges: Sequence[PendingRequest], snapshots: Sequence[Snapshot]) -> None:
        """Bring requests up to what their ledgers say."""
        for exchange, snapshot in zip(exchanges, snapshots, strict=True):
            self._lost.pop(exchange.id, None)
            exchange.digest = exchange.digest or snapshot.digest
            self._settle(exchange, snapshot)
            self._sort(exchange)

    def _settle(self, exchange: PendingRequest, snapshot: Snapshot) -> None:
        if not snapshot.state:
            exchange.fail(unknown(exchange.id))
        elif snapshot.state in TERMINAL and snapshot.result is not None:
            exchange.take(decode_reply(snapshot.result), exchange.heard_at)
        elif exchange.needs_tokens:
            exchange.take_published(snapshot.published)


def read_entries(answer: Any) -> Sequence[Entry]:
    """The entries of the one stream that an XREAD asked for."""
    if not answer:
        return []
    [(_, entries)] = answer
    return list(entries)
