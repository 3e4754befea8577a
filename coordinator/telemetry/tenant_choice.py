"""Which tenants have series of their own, without I/O: few at a time, and seldom others.

Each tenant that ever had a series costs whoever stores them, so the choice follows what tenants
had over hours, and not who happens to be ahead in the line.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

#: Tenants with series of their own.
MOST_TENANTS: Final = 20
#: How often one of them may give way to another one, in seconds.
REVIEW_S: Final = 3600.0
#: And only to one that had so many times as much in that time.
FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What a tenant has at one moment."""

    had: float = 0.0  # weighted tokens by weight, ever; without what rest has added
    waiting: int = 0  # requests
    running: int = 0
    is_there: bool = True  # False: the yard knows nothing of it


class TenantChoice:
    """The choice of one coordinator; it outlasts its terms."""

    def __init__(self) -> None:
        self.names: list[str] = []  # the chosen ones
        self.compared: frozenset[str] = frozenset()  # that the next review needs to see
        self._had: Mapping[str, float] = {}  # of those compared, at the last review
        self._due_s = -math.inf

    def is_open(self, now_s: float) -> bool:
        """Whether it is to be told of tenants that might be chosen."""
        return len(self.names) < MOST_TENANTS or now_s >= self._due_s

    def update(
        self, found: Mapping[str, TenantFigures], candidates: Collection[str], now_s: float
    ) -> None:
        """Choose again; ``found`` are the chosen, the candidates and those to be compared.

        Who is not there any more gives up its place at once, and a free place is given at once, to
        whoever has had most. ``now_s`` is any steady clock.
        """
        there = {name: one for name, one in found.items() if one.is_there}
        self.names = [name for name in self.names if name in there]
        others = sorted(there.keys() - set(self.names), key=lambda name: (-there[name].had, name))
        room = MOST_TENANTS - len(self.names)
        self.names += others[:room]
        if now_s >= self._due_s:
            self._exchange(there, others[room:])
            self.compared = frozenset(there.keys() & {*candidates, *self.names})
            self._had = {name: there[name].had for name in self.compared}
            self._due_s = now_s + REVIEW_S

    def _exchange(self, there: Mapping[str, TenantFigures], others: Collection[str]) -> None:
        """Let the one who had least since the last review give way to the one who had most."""
        lately = {name: there[name].had - had for name, had in self._had.items() if name in there}

        def rank(name: str) -> tuple[float, str]:
            return lately[name], name

        least = min(lately.keys() & set(self.names), key=rank, default="")
        most = max(lately.keys() & set(others), key=rank, default="")
        if least and most and lately[most] > FACTOR * max(0.0, lately[least]):
            self.names[self.names.index(least)] = most
