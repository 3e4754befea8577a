"""Which tenant is served next, and what a request is charged: shares by tokens.

A virtual token counter (Sheng et al., OSDI 2024, arXiv 2401.00588): the service of a tenant is what
it has had in weighted tokens, divided by its weight, and of those who wait the one with the least
is served next. docs/tenants.md derives how far two of them can be apart.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from msgspec import Struct

from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.tenants import DEFAULTS, TenantSettings
from tokenyard.scripts.answers import Charge

#: Length of an answer of a tenant of which nothing is known yet, in tokens. Rather too short: where
#: all places are charged too much, and it is given back, whoever joined the line in between is far
#: behind (`benchmarks/fairness`: a light tenant waited 5.6 s with 512, and 0.1 s with 32).
USUAL_AT_FIRST: Final = 32
#: A tenant's limits are read again where it is among the first; the rest needs no room.
MOST_KNOWN: Final = 10_000


class TenantState(Struct):
    """What the leader knows of a tenant that is, or was, among the first in line."""

    settings: TenantSettings = DEFAULTS
    usual: float = USUAL_AT_FIRST  # tokens of its answers
    running: int = 0

    @property
    def is_limited(self) -> bool:
        """Whether only so many of its requests may run at once."""
        return self.settings.max_running_requests > 0

    @property
    def left(self) -> float:
        """How many more of its requests may run."""
        return self.settings.max_running_requests - self.running if self.is_limited else math.inf


class TenantShares:
    """The service of tenants as far as it is known; scripts keep it exactly, in Redis."""

    def __init__(self, *, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        #: Tenants that run as many requests as they may.
        self.held = HeldTenants()
        #: What the plan of this turn charges so far.
        self.planned: defaultdict[str, float] = defaultdict(float)
        self.clear()

    def clear(self) -> None:
        """Forget everything, as in a new term."""
        self._services: dict[str, float] = {}
        self._states: dict[str, TenantState] = {}
        #: The first of the line with their service, as just read; empty while nobody is in line.
        self.first: dict[str, float] = {}
        #: Whether others stand behind those.
        self.has_more = False
        #: Tenants of the first with requests in Redis that were not read yet.
        self.unread: set[str] = set()
        self.held.clear()

    def see(self, first: Mapping[str, float], *, has_more: bool) -> bool:
        """The first of the line, the least service first; whether others had to be forgotten."""
        self.first = dict(first)
        self.has_more = has_more
        self._services.update(first)
        if not first:
            self._services.clear()
        has_too_many = len(self._states) > MOST_KNOWN
        if has_too_many:
            self._states = {name: one for name, one in self._states.items() if name in first}
        return has_too_many

    def note(self, tenant: str, service: float) -> None:
        """The service of one that may stand behind the first."""
        self._services[tenant] = service

    def state(self, tenant: str) -> TenantState:
        """What is known of a tenant."""
        state = self._states.get(tenant)
        if state is None:
            state = self._states[tenant] = TenantState()
        return state

    def configure(self, tenant: str, settings: TenantSettings | None) -> None:
        """The settings of a tenant; None: it has none."""
        self.state(tenant).settings = settings or DEFAULTS
        self._weigh_limit(tenant)

    def count(self, tenant: str, *, usual: float, running: int) -> None:
        """The usual length of a tenant's answers, and how many of its requests run."""
        state = self.state(tenant)
        state.usual, state.running = usual, running
        self._weigh_limit(tenant)

    def _weigh_limit(self, tenant: str) -> None:
        """Note whether a tenant is at its limit; where it has none, a script may know of one."""
        state = self.state(tenant)
        if state.left <= 0:
            self.held.add(tenant)
        elif state.is_limited or not self.held.is_refused(tenant):
            self.held.discard(tenant)

    def left(self, tenant: str) -> float:
        """How many more requests of a tenant may run."""
        return 0 if tenant in self.held else self.state(tenant).left

    def service(self, tenant: str) -> float:
        """What a tenant has had; who is not among the first has had no less than those."""
        known = self.first.get(tenant)
        return max(self._services.get(tenant, 0.0), self.horizon) if known is None else known

    @property
    def horizon(self) -> float:
        """The service up to which the line is known exactly."""
        return next(reversed(self.first.values()), 0.0) if self.has_more else 0.0

    def charge(self, queued: QueuedRequest) -> Charge | None:
        """What a request is charged at its dispatch; None where nobody would compare it."""
        tenant = queued.tenant
        if not tenant and not self.first:
            return None
        weight = self.state(tenant).settings.weight
        per_input, per_output = self._input_weight / weight, self._output_weight / weight
        return Charge(tenant, self.amount(queued), per_input, per_output, queued.model)

    def amount(self, queued: QueuedRequest) -> float:
        """The amount of that charge."""
        tenant = queued.tenant
        if not tenant and not self.first:
            return 0.0
        state = self.state(tenant)
        weight, output = state.settings.weight, min(state.usual, queued.max_output)
        per_input, per_output = self._input_weight / weight, self._output_weight / weight
        return queued.tokens * per_input + output * per_output

    def order(
        self, queues: Mapping[str, Iterable[QueuedRequest]], spent: Mapping[str, float]
    ) -> Iterator[QueuedRequest]:
        """The requests of these tenants: of whoever has had least, and each adds its charge.

        ``spent`` is what they had in this turn. It ends where only the next turn can know who is
        next: behind the horizon, or at a tenant with requests that were not read yet.
        """
        names, limit = self._competing(queues)
        line = [(self.service(name) + spent.get(name, 0.0), name) for name in names]
        heapq.heapify(line)
        requests = {name: iter(queues[name]) for name in names}
        left = {name: self.left(name) for name in names}
        while line and line[0][0] <= limit:
            service, name = line[0]
            queued = next(requests[name], None) if left[name] > 0 else None
            if queued is None and left[name] > 0 and name in self.unread:
                return
            if queued is None:
                heapq.heappop(line)
                continue
            yield queued
            left[name] -= 1
            heapq.heapreplace(line, (service + self.amount(queued), name))

    def _competing(self, queues: Mapping[str, Iterable[QueuedRequest]]) -> tuple[list[str], float]:
        """Who has something to run, and the service up to which nobody else is before them."""
        able = [name for name in self.first if queues.get(name) and self.left(name) > 0]
        if able and self.has_more:
            return able, self.horizon
        return [name for name, queue in queues.items() if queue and self.left(name) > 0], math.inf

    def plan(self, placed: Iterable[QueuedRequest]) -> None:
        """These are part of this turn's plan: the other models must know."""
        if self.first:
            for queued in placed:
                self.planned[queued.tenant] += self.amount(queued)

    def note_dispatched(self, charge: Charge) -> None:
        """A request was charged: until the line is read again, this is what is known."""
        tenant = charge.tenant
        self._services[tenant] = self._services.get(tenant, 0.0) + charge.amount
        if tenant in self.first:
            self.first[tenant] += charge.amount
        self.state(tenant).running += 1
        self._weigh_limit(tenant)


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
