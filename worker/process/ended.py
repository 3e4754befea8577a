"""What an engine has answered lately, for a request that comes again since the server lost its end.

A server that comes back without its last writes (a power failure under ``appendfsync everysec``,
a replica that took over) may have a request on a lane whose result its client has read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from tokenyard.protocol.replies import Reply, decode_reply, encode_reply
from tokenyard.protocol.wire import Assignment
from worker.process.outcomes import Run

#: A result is kept for so long, which a server and its machine may take to come back.
MOST_S: Final = 900.0
#: So many at most, which is more than a worker ends in the second or two that can be lost,
MOST_RESULTS: Final = 10_000
#: and so many bytes, about.
MOST_BYTES: Final = 16 * 1024 * 1024
#: What a result takes beside its packed form, about.
_FIXED_BYTES: Final = 350


class Ended:
    """The completed results of one engine that are known to be published, within bounds.

    Publishers add to it, and the engine's thread asks it: any thread may call it.
    """

    def __init__(
        self,
        *,
        most_s: float = MOST_S,
        most_results: int = MOST_RESULTS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._most_s = most_s
        self._most_results = most_results
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # When it ended (monotonic), and the result; the oldest first. Packed it is one object in
        # the place of ten, which nobody has near by when they have to go.
        self._results: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0
        self._forgotten_at = float("-inf")

    @property
    def count(self) -> int:
        """How many it has."""
        return len(self._results)

    def keep(self, ended: Iterable[tuple[Run, Reply]], now: float) -> None:
        """Remember published results; ``now`` is monotonic. What failed may be tried again."""
        results = self._results
        with self._lock:
            for run, reply in ended:
                if reply.status != "completed" or run.began < self._forgotten_at:
                    continue
                key, packed = _key(run.assignment), encode_reply(reply)
                if key in results:
                    self._drop(key)
                results[key] = now, packed
                self._bytes += len(packed) + _FIXED_BYTES
            self._bound(now)

    def find(self, assignment: Assignment) -> Reply | None:
        """The result of this request, where it is known."""
        found = self._results.get(_key(assignment))
        if found is None or found[0] < time.monotonic() - self._most_s:
            return None
        return decode_reply(found[1])

    def forget(self) -> None:
        """Forget all that was begun until now: from here on the engine would answer otherwise."""
        with self._lock:
            self._forgotten_at = time.monotonic()
            self._results.clear()
            self._bytes = 0

    def _bound(self, now: float) -> None:
        results = self._results
        while results:
            oldest = next(iter(results))
            if (
                len(results) <= self._most_results
                and self._bytes <= self._most_bytes
                and results[oldest][0] >= now - self._most_s
            ):
                return
            self._drop(oldest)

    def _drop(self, key: str) -> None:
        self._bytes -= len(self._results.pop(key)[1]) + _FIXED_BYTES


def _key(assignment: Assignment) -> str:
    """The server id tells a request from a later one of the same name."""
    request = assignment.request
    return f"{request.client}/{request.id}/{assignment.sid}"
