"""Tenants that run as many requests as they may, as far as the leader knows.

Nobody tells the leader whose request has ended, so it looks at the counts of these again, some in a
turn, after any place has become free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice


class HeldTenants:
    """Their names, the one that was looked at longest ago first."""

    def __init__(self) -> None:
        #: Whether it is only known from a refusal: the leader cannot read the tenant's limit.
        self._is_refused: dict[str, bool] = {}
        self._left = 0  # to look at in this lap

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._is_refused

    def __iter__(self) -> Iterator[str]:
        return iter(self._is_refused)

    @property
    def has_more(self) -> bool:
        """Whether some were not looked at since a place became free."""
        return min(self._left, len(self._is_refused)) > 0

    def clear(self) -> None:
        """Forget all of them."""
        self._is_refused.clear()

    def add(self, tenant: str) -> None:
        """A tenant is at its limit."""
        self._is_refused.setdefault(tenant, False)

    def refuse(self, tenant: str) -> None:
        """A script has held a tenant's request."""
        self._is_refused.setdefault(tenant, True)

    def is_refused(self, tenant: str) -> bool:
        """Whether it is here only since a script has held a request."""
        return self._is_refused.get(tenant, False)

    def discard(self, tenant: str) -> None:
        """A tenant may run more, or has nothing to run."""
        self._is_refused.pop(tenant, None)

    def release(self, is_known: Callable[[str], bool]) -> None:
        """Now and then: try those again that were refused, and forget who is not known."""
        held = [name for name, is_refused in self._is_refused.items() if not is_refused]
        self._is_refused = dict.fromkeys(filter(is_known, held), False)

    def wake(self) -> None:
        """A place has become free: look at all of them again."""
        self._left = len(self._is_refused)

    def next_page(self, size: int) -> list[str]:
        """Those to look at now; they are the last to come again."""
        page = list(islice(self._is_refused, size))
        for name in page:
            self._is_refused[name] = self._is_refused.pop(name)
        self._left = max(0, self._left - size)
        return page
