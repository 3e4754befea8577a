"""How far apart two waiting tenants can be: the bound of docs/tenants.md, through the real scripts.

Random tenants, weights, lengths and ends; after every turn no two tenants that both wait may differ
by more than `service_gap`, and no place may be empty.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import Struct

import coordinator.dispatch.tenant_intakes
from coordinator.dispatch.tenant_shares import service_gap
from tests.support.servers import Server
from tests.support.tenants import TenantYard, tenant_yard
from tokenyard.protocol.keys import PRIORITY_CLASSES

pytestmark = [pytest.mark.both_servers, pytest.mark.timeout(400)]

NAMES = ("", "a", "b", "c", "d")
MOST_TOKENS, MOST_OUTPUT = 30, 24
W_IN, W_OUT = 1.0, 2.0


class Play(Struct, frozen=True):
    """A random yard: places of its workers, weights of its tenants."""

    places: tuple[int, ...]
    weights: tuple[float, ...]
    page: int
    #: Whether every answer is as long as it may be, and as usual: then charges are exact.
    is_exact: bool

    def weight(self, tenant: str) -> float:
        return dict(zip(NAMES, (1.0, *self.weights), strict=True))[tenant]

    @property
    def gap(self) -> float:
        """The bound, by the least weight."""
        least = min(1.0, *self.weights)
        charge = (W_IN * MOST_TOKENS + W_OUT * MOST_OUTPUT) / least
        error = 0.0 if self.is_exact else W_OUT * MOST_OUTPUT / least
        return service_gap(charge, error, sum(self.places))


plays = st.builds(
    Play,
    places=st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple),
    weights=st.tuples(*[st.sampled_from([1.0, 2.0, 4.0])] * 4),
    page=st.sampled_from([2, 64]),
    is_exact=st.booleans(),
)


class Watch:
    """What tenants have had by the requests dispatched, and the largest differences."""

    def __init__(self, yard: TenantYard, play: Play) -> None:
        self._yard = yard
        self._play = play
        self._outputs: dict[str, int] = {}  # tokens that a request will have
        self._had: defaultdict[str, float] = defaultdict(float)
        self._seen: set[str] = set()
        # The least and the largest lead of one tenant over another since both have waited.
        self._leads: dict[tuple[str, str], tuple[float, float]] = {}
        self.workers = [
            yard.worker(f"w{number}", lane_limit=places)
            for number, places in enumerate(play.places)
        ]
        for name in NAMES[1:]:
            yard.set(name, weight=play.weight(name))
        yard.lead()

    def ask(self, tenant: str, count: int, tokens: int, output: int, used: int, rank: int) -> None:
        output = MOST_OUTPUT if self._play.is_exact else output
        name = PRIORITY_CLASSES[rank]
        asked = self._yard.ask(tenant, count, tokens=tokens, output=output, priority_class=name)
        for one in asked:
            self._outputs[one.id] = output if self._play.is_exact else min(used, output)

    def end(self, which: int) -> None:
        """End a running request."""
        running = [(worker, one) for worker in self.workers for one in self._yard.lane(worker)]
        if running:
            worker, one = running[which % len(running)]
            self._yard.end(worker, one, output=self._outputs[one.request.id])

    def check(self) -> None:
        """After a turn."""
        self._note_dispatched()
        waiting = [name for name in NAMES if self._yard.waits(name)]
        load = sum(map(self._yard.load, self.workers))
        assert not waiting or load == sum(self._play.places), "a place is empty"
        line = self._yard.line()
        if len(waiting) > 1:
            assert set(line) == set(waiting)
            spread = max(line.values()) - min(line.values())
            assert spread <= self._play.gap + 1e-6, line
        pairs = set(permutations(waiting, 2))
        self._leads = {pair: lead for pair, lead in self._leads.items() if pair in pairs}
        for one, two in pairs:
            lead = self._had[one] - self._had[two]
            least, most = self._leads.get((one, two), (lead, lead))
            self._leads[one, two] = least, most = min(least, lead), max(most, lead)
            assert most - least <= 2 * self._play.gap + 1e-6, (one, two)

    def _note_dispatched(self) -> None:
        for worker in self.workers:
            for one in self._yard.lane(worker):
                request = one.request
                if request.id not in self._seen:
                    self._seen.add(request.id)
                    used = W_IN * len(request.tokens or b"") / 4
                    used += W_OUT * self._outputs[request.id]
                    self._had[request.tenant] += used / self._play.weight(request.tenant)


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.sampled_from(NAMES),
            st.integers(1, 12),
            st.integers(1, MOST_TOKENS),
            st.integers(1, MOST_OUTPUT),
            st.integers(0, MOST_OUTPUT),
            st.integers(0, 2),
        ),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("lead")),
    ),
    min_size=10,
    max_size=60,
)


@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a smaller example would take minutes
    suppress_health_check=list(HealthCheck),
)
@given(play=plays, steps=steps)
def test_waiting_tenants_stay_within_the_bound(broker: Server, play: Play, steps: list) -> None:
    with tenant_yard(broker.url) as yard, pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator.dispatch.tenant_intakes, "PAGE", play.page)
        watch = Watch(yard, play)
        for name, *values in steps:
            if name == "ask":
                watch.ask(*values)
            elif name == "end":
                watch.end(*values)
            else:
                yard.lead()
            yard.rest()
            watch.check()
