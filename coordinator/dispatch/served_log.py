"""How many requests were dispatched in the last minutes, to tell what was served before a request.

It is the leader's memory: it costs the broker nothing, and what was dispatched before its term is
not known. It counts by the second, so what it tells of a request is never too much. Who the others
were is not told, since a tenant may read the ledgers of its own requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.keys import PRIORITY_CLASSES
from tokenyard.protocol.texts import span

_STEP_MS: Final = 1_000
#: Steps that are remembered, at least.
_KEPT: Final = 600
#: Intakes and tenants that are counted one by one; of more only the sum is known.
_MOST: Final = 256
#: A request that waited less gets no explanation.
LEAST_WAIT_MS: Final = 1_000


class _Tally:
    """How often something happened, by step."""

    __slots__ = ("_steps", "_totals")

    def __init__(self) -> None:
        self._steps = [-1]
        self._totals = [0]  # until the end of each of those steps

    def add(self, step: int) -> None:
        """Count one; steps only grow."""
        if self._steps[-1] >= step:
            self._totals[-1] += 1
            return
        self._steps.append(step)
        self._totals.append(self._totals[-1] + 1)
        if len(self._steps) > 2 * _KEPT:
            del self._steps[:_KEPT], self._totals[:_KEPT]

    def since(self, step: int) -> int:
        """How often it happened after that step."""
        at = bisect_right(self._steps, step) - 1
        return self._totals[-1] - self._totals[max(0, at)]

    @property
    def last(self) -> int:
        """The last step in which it happened."""
        return self._steps[-1]


class _Tallies:
    """Tallies by name, a bounded number."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Tally] = {}

    def add(self, name: str, step: int) -> None:
        """Count one, unless there are too many names."""
        tally = self._by_name.get(name)
        if tally is None and len(self._by_name) < _MOST:
            tally = self._by_name[name] = _Tally()
        if tally is not None:
            tally.add(step)

    def since(self, name: str, step: int) -> int:
        """How often it happened after that step, as far as known."""
        tally = self._by_name.get(name)
        return tally.since(step) if tally else 0

    @property
    def is_full(self) -> bool:
        """Whether there may be names that are not counted."""
        return len(self._by_name) == _MOST

    def forget(self, step: int) -> None:
        """Make room: what did not happen after that step is not needed any more."""
        if self.is_full:
            self._by_name = {name: one for name, one in self._by_name.items() if one.last > step}


class ServedLog:
    """Counts dispatched requests by intake, and the time for which tenants were at a limit."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, as in a new term."""
        self._all = _Tally()
        self._by_intake = _Tallies()
        self._held = _Tallies()  # by tenant
        self._step = -1
        self._first_step = -1  # of this term
        self._told: dict[tuple[str, int], str] = {}  # in this step

    def begin_turn(self, now_ms: float, held: Iterable[str]) -> None:
        """Requests are about to be dispatched; ``held`` run as many as they may."""
        step = int(now_ms // _STEP_MS)
        if step <= self._step:
            return
        self._step = step
        if self._first_step < 0:
            self._first_step = step
        self._told.clear()
        self._by_intake.forget(step - _KEPT)
        self._held.forget(step - _KEPT)
        for tenant in held:
            self._held.add(tenant, step)

    def note(self, queued: QueuedRequest) -> None:
        """A request was dispatched in this turn."""
        self._all.add(self._step)
        self._by_intake.add(queued.intake, self._step)

    def tell(self, queued: QueuedRequest, now_ms: float) -> str:
        """What was served before it, in words; "" where it waited shortly, or not in line."""
        if now_ms - queued.since_ms < LEAST_WAIT_MS or queued.intake == "retry":
            return ""
        since = int(queued.since_ms // _STEP_MS)
        key = (queued.intake, since)
        if key not in self._told:
            self._told[key] = "; ".join(self._words(queued.tenant, since))
        return self._told[key]

    def _words(self, tenant: str, since: int) -> Iterator[str]:
        own = {
            name: self._by_intake.since(f"{name}:{tenant}" if tenant else name, since)
            for name in PRIORITY_CLASSES
        }
        served = [f"{count} {name} of its own" for name, count in own.items() if count]
        total = self._all.since(since)
        if self._by_intake.is_full and total:
            served.insert(0, f"{total} in all")
        elif total > sum(own.values()):
            served.insert(0, f"{total - sum(own.values())} of others")
        if served:
            begun = " by this leader" if since < self._first_step else ""
            yield f"served before it{begun}: {', '.join(served)}"
        if held := self._held.since(tenant, since):
            yield f"its tenant ran max_running_requests for about {span(held * _STEP_MS)}"
