"""How fast tokens of a request are published, from repeated looks at their number."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final

#: A rate is that of the last looks, at most so long ago.
_WINDOW_MS: Final = 10_000
#: Looks closer together than this tell nothing new.
_LEAST_MS: Final = 200
#: Requests whose looks are kept.
_MOST: Final = 512


class TokenRates:
    """Rates of the requests that somebody looks at; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: OrderedDict[Hashable, deque[tuple[int, int]]] = OrderedDict()

    def note(self, request: Hashable, now_ms: int, tokens: int) -> float | None:
        """Note the number of tokens now; tokens per second, None at the first look."""
        with self._lock:
            looks = self._looks.setdefault(request, deque())
            self._looks.move_to_end(request)
            while len(self._looks) > _MOST:
                self._looks.popitem(last=False)
            if looks and tokens < looks[-1][1]:
                looks.clear()  # it has ended, or runs under this id again
            if not looks or now_ms - looks[-1][0] >= _LEAST_MS:
                looks.append((now_ms, tokens))
            while len(looks) > 2 and now_ms - looks[0][0] > _WINDOW_MS:
                looks.popleft()
            (first_ms, first), (last_ms, last) = looks[0], looks[-1]
        return (last - first) * 1000 / (last_ms - first_ms) if last_ms > first_ms else None
