"""Finds requests of the backlog that do not wait any more: cancelled, or answered by another.

The coordinator is not notified of a cancelled request, and a request for a model without a worker
may wait for long: it must not count as demand. So when fewer requests are pending than are in the
backlog, the two are compared, page by page, since there may be very many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tokenyard.protocol.streams import position

PAGE = 1000
#: After an audit there is no other for so many times its duration.
REST = 9


class PendingReconciler:
    """Compares the entries of one class with what is pending, a page in a turn."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.after = "-"  # start of the next page, as XPENDING understands it
        self._left = iter(entries)
        self._next = next(self._left, None)
        self._began = time.monotonic()

    def rests_until(self) -> float:
        """When the next audit may begin (monotonic), if this one ends now."""
        now = time.monotonic()
        return now + REST * (now - self._began)

    @property
    def is_over(self) -> bool:
        """Whether all entries were compared."""
        return self._next is None

    def compare(self, pending: Sequence[str]) -> list[str]:
        """Entries of the backlog that are not pending, up to the end of a page of `PAGE`.

        A page that is not full is the last one.
        """
        is_last = len(pending) < PAGE
        end = (math.inf, 0) if is_last else position(pending[-1])
        known, gone = set(pending), []
        while self._next is not None and position(self._next) <= end:
            if self._next not in known:
                gone.append(self._next)
            self._next = next(self._left, None)
        if pending:
            self.after = f"({pending[-1]}"
        return gone
