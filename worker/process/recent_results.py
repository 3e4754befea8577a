"""Results that an engine published recently, in case the server loses them.

A server that comes back without its last writes (a power failure under ``appendfsync everysec``,
a replica that took over) may put a request on a lane whose result the client has already read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from tokenyard import clock
from tokenyard.protocol.replies import Reply, decode_reply
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts.answers import Publication
from worker.process.outcomes import Run

#: How long a result is kept: the time in which a server and its machine may come back.
MOST_S: Final = 900.0
#: More than a worker completes in the one or two seconds of writes that can be lost.
MOST_RESULTS: Final = 10_000
#: Approximate bound.
MOST_BYTES: Final = 16 * 1024 * 1024
#: Approximate overhead of a result beside its packed form.
_FIXED_BYTES: Final = 350


class RecentResults:
    """The completed and published results of one engine, within bounds.

    Publishers add to it and the engine's thread reads it; it is thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Time (monotonic) and packed result, oldest first. Packed, it is one object instead of
        # ten, which makes dropping it cheap.
        self._results: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0
        self._forgotten_at = float("-inf")

    def keep(self, ended: Iterable[tuple[Run, Publication]], now: float) -> None:
        """Keep published results; ``now`` is monotonic. Failed requests may be tried again."""
        results = self._results
        with self._lock:
            for run, item in ended:
                if item.reply.status != "completed" or run.began < self._forgotten_at:
                    continue
                key, packed = _key(run.assignment), item.packed()
                if key in results:
                    self._drop(key)
                results[key] = now, packed
                self._bytes += len(packed) + _FIXED_BYTES
            self._bound(now)

    def find(self, assignment: Assignment) -> Reply | None:
        """The result of this request, or None."""
        found = self._results.get(_key(assignment))
        if found is None or found[0] < clock.monotonic() - MOST_S:
            return None
        return decode_reply(found[1])

    def forget(self) -> None:
        """Forget all requests begun until now: the engine would answer differently from here on."""
        with self._lock:
            self._forgotten_at = clock.monotonic()
            self._results.clear()
            self._bytes = 0

    def _bound(self, now: float) -> None:
        results = self._results
        while results:
            oldest = next(iter(results))
            if (
                len(results) <= MOST_RESULTS
                and self._bytes <= MOST_BYTES
                and results[oldest][0] >= now - MOST_S
            ):
                return
            self._drop(oldest)

    def _drop(self, key: str) -> None:
        self._bytes -= len(self._results.pop(key)[1]) + _FIXED_BYTES


def _key(assignment: Assignment) -> str:
    """The server id distinguishes a request from a later one with the same id."""
    request = assignment.request
    return f"{request.client}/{request.id}/{assignment.sid}"
