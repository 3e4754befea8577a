"""Finds requests of the backlog that do not wait any more: cancelled, or answered by another.

The coordinator is not notified of a cancelled request, and a request for a model without a worker
may wait for long: it must not count as demand. So when not as many wait as are in the backlog, the
two are compared, page by page, since there may be very many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tokenyard import clock
from tokenyard.protocol.streams import position

#: Entries of a page. It has whole requests, so no more than a turn reads anyway.
PAGE = 100
#: After an audit there is no other for so many times its duration: 2 % of the leader's time, for as
#: long as more wait than may be in the backlog.
REST = 49


class BacklogReconciler:
    """Compares the entries of one class with what waits, a page in a turn."""

    def __init__(self, entries: Iterable[str]) -> None:
        ids = sorted(entries, key=position)  # read again they may be in another order
        self.after = "-"  # start of the next page, as XRANGE understands it
        self.last = ids[-1] if ids else "-"  # where the last page ends
        self._left = iter(ids)
        self._next = next(self._left, None)
        self._began = clock.monotonic()

    def rests_until(self) -> float:
        """When the next audit may begin (monotonic), if this one ends now."""
        now = clock.monotonic()
        return now + REST * (now - self._began)

    @property
    def is_over(self) -> bool:
        """Whether all entries were compared."""
        return self._next is None

    def compare(self, waiting: Sequence[str]) -> list[str]:
        """Entries of the backlog that do not wait any more, up to the end of a page of `PAGE`.

        A page that is not full is the last one.
        """
        is_last = len(waiting) < PAGE
        end = (math.inf, 0) if is_last else position(waiting[-1])
        known, gone = set(waiting), []
        while self._next is not None and position(self._next) <= end:
            if self._next not in known:
                gone.append(self._next)
            self._next = next(self._left, None)
        if waiting:
            self.after = f"({waiting[-1]}"
        return gone
