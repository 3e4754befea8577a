"""The windows over which a tenant's tokens and refusals are counted; scripts write them.

Each is a ring of buckets in the hash of the tenant. It slides by one bucket, and has one more than
it is long, so that no span of that length has more tokens than the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Longer numbers are none of the scripts'.
_MOST_DIGITS: Final = 15


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """One window: the limit's name in `TenantSettings`, and the form of its ring."""

    limit: str
    mark: str
    width_ms: int
    count: int

    @property
    def fields(self) -> list[str]:
        """The fields of its buckets."""
        return [f"{self.mark}{number}" for number in range(self.count)]

    def read(self, values: Sequence[bytes | None], now_ms: int) -> tuple[int, int]:
        """The tokens in the window, and in how many ms the last of them have left it."""
        now, tokens, newest = now_ms // self.width_ms, 0, None
        for value in values:
            number, _, sum_ = (value or b"").partition(b" ")
            if not all(one.isdigit() and len(one) <= _MOST_DIGITS for one in (number, sum_)):
                continue
            at = int(number)
            if abs(now - at) < self.count and int(sum_):
                tokens += int(sum_)
                newest = max(newest or 0, at)
        if newest is None:
            return 0, 0
        return tokens, (newest + self.count) * self.width_ms - now_ms


MINUTE: Final = TokenWindow("tokens_per_minute", "m", 5_000, 13)
DAY: Final = TokenWindow("tokens_per_day", "d", 1_800_000, 49)


def refusals_of(limit: str) -> TokenWindow:
    """The requests that a limit has refused in this hour and the one before."""
    return TokenWindow(limit, f"refused:{limit}:", 3_600_000, 2)
