"""How far apart two waiting tenants can be: the bound of docs/tenants.md, through the real scripts.

Random tenants, weights, lengths, ends and cancels; after every turn no two tenants that both wait
may differ by more than that, and no place may be empty. In any time in which both wait, what they
were given, and what was generated for them, differs by no more than follows from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from msgspec import Struct

import coordinator.dispatch.tenant_intakes
from tests.support.servers import Server
from tests.support.tenants import TenantYard
from tokenyard.protocol.keys import PRIORITY_CLASSES, intake_name
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Cancelled

pytestmark = pytest.mark.timeout(400)

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
    #: Whether tenants may join the line while a plan is carried out.
    is_joined: bool

    def weight(self, tenant: str) -> float:
        return dict(zip(NAMES, (1.0, *self.weights), strict=True))[tenant]

    @property
    def gap(self) -> float:
        """The bound, by the least weight."""
        least = min(1.0, *self.weights)
        charge = (W_IN * MOST_TOKENS + W_OUT * MOST_OUTPUT) / least
        error = 0.0 if self.is_exact else W_OUT * MOST_OUTPUT / least
        places = sum(self.places)
        return (places if self.is_joined else 1) * charge + places * error


plays = st.builds(
    Play,
    places=st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple),
    weights=st.tuples(*[st.sampled_from([1.0, 2.0, 4.0])] * 4),
    page=st.sampled_from([2, 64]),
    is_exact=st.booleans(),
    is_joined=st.booleans(),
)


class Leads:
    """The least and the largest lead of one tenant over another since both have waited."""

    def __init__(self) -> None:
        self.had: defaultdict[str, float] = defaultdict(float)
        self._leads: dict[tuple[str, str], tuple[float, float]] = {}

    def most(self, waiting: list[str]) -> float:
        """By how much one may have fallen behind another in some time, at most."""
        pairs = set(permutations(waiting, 2))
        self._leads = {pair: lead for pair, lead in self._leads.items() if pair in pairs}
        for one, two in pairs:
            lead = self.had[one] - self.had[two]
            least, most = self._leads.get((one, two), (lead, lead))
            self._leads[one, two] = min(least, lead), max(most, lead)
        return max((most - least for least, most in self._leads.values()), default=0.0)


class Watch:
    """What tenants have had by the requests dispatched and the tokens generated."""

    def __init__(self, yard: TenantYard, play: Play) -> None:
        self._yard = yard
        self._play = play
        self._outputs: dict[str, int] = {}  # tokens that a request will have
        self._given = Leads()
        self._generated = Leads()
        self._made: dict[str, int] = {}  # tokens that the running requests have
        self._seen: set[str] = set()
        self._most_due = 0.0  # tokens of one tenant on the lanes that were still to be generated
        self._meanwhile: list[Callable[[], None]] = []  # at the next call of `dispatch`
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

    def join(self, *values: Any) -> None:
        """Ask, while the next plan is carried out if tenants may join then."""
        if self._play.is_joined:
            self._meanwhile.append(lambda: self.ask(*values))
        else:
            self.ask(*values)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Requests come between a plan and the call that carries it out."""
        dispatch = Scripts.dispatch

        def late(scripts: Scripts, *args: Any) -> Any:
            while self._meanwhile:
                self._meanwhile.pop()()
            return dispatch(scripts, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scripts, "dispatch", late)
            yield

    def generate(self, count: int) -> None:
        """Every running request gets so many tokens, if it has so many left."""
        for worker in self.workers:
            for one in self._yard.lane(worker):
                request = one.request
                made = self._made[request.id]
                self._made[request.id] = min(made + count, self._outputs[request.id])
                self._note_generated(request.tenant, self._made[request.id] - made)

    def end(self, which: int) -> None:
        """End a running request; what an engine finds in its cache changes nothing."""
        running = [(worker, one) for worker in self.workers for one in self._yard.lane(worker)]
        if running:
            worker, one = running[which % len(running)]
            output = self._outputs[one.request.id]
            self._note_generated(one.request.tenant, output - self._made.pop(one.request.id))
            self._yard.end(worker, one, output=output, cached=which)

    def cancel(self, which: int) -> None:
        """A client cancels a request that waits."""
        entries = [
            fields
            for name in NAMES
            for intake in (intake_name(one, name) for one in PRIORITY_CLASSES)
            for _, fields in self._yard.connection.xrange(self._yard.keys.intake(intake))
        ]
        if entries:
            request_id = entries[which % len(entries)][b"id"].decode()
            code = self._yard.scripts.cancel("anon", request_id, "the test says so")
            assert code is Cancelled.CANCELLED

    def _note_generated(self, tenant: str, tokens: int) -> None:
        self._generated.had[tenant] += W_OUT * tokens / self._play.weight(tenant)

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
        assert self._given.most(waiting) <= 2 * self._play.gap + 1e-6
        bound = 2 * (self._play.gap + self._most_due)
        assert self._generated.most(waiting) <= bound + 1e-6

    def _note_dispatched(self) -> None:
        due: defaultdict[str, float] = defaultdict(float)
        for worker in self.workers:
            for one in self._yard.lane(worker):
                request = one.request
                weight = self._play.weight(request.tenant)
                output = W_OUT * self._outputs[request.id] / weight
                if request.id not in self._seen:
                    self._seen.add(request.id)
                    self._made[request.id] = 0
                    prompt = W_IN * len(request.tokens or b"") / 4 / weight
                    self._given.had[request.tenant] += prompt + output
                    self._generated.had[request.tenant] += prompt
                due[request.tenant] += output - W_OUT * self._made[request.id] / weight
        self._most_due = max(self._most_due, *due.values(), 0.0)


steps = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["ask", "join"]),
            st.sampled_from(NAMES),
            st.integers(1, 12),
            st.integers(1, MOST_TOKENS),
            st.integers(1, MOST_OUTPUT),
            st.integers(0, MOST_OUTPUT),
            st.integers(0, 2),
        ),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("generate"), st.integers(1, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 99)),
        st.tuples(st.just("lead")),
    ),
    min_size=10,
    max_size=60,
)


@pytest.mark.long
@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a smaller example would take minutes
    suppress_health_check=list(HealthCheck),
)
@given(play=plays, steps=steps)
@example(  # one joins while another is given a whole plan: exactly the bound
    play=Play((5,), (1.0,) * 4, page=64, is_exact=True, is_joined=True),
    steps=[
        ("join", "b", 12, MOST_TOKENS, MOST_OUTPUT, MOST_OUTPUT, 1),
        ("ask", "a", 12, MOST_TOKENS, MOST_OUTPUT, MOST_OUTPUT, 1),
    ],
)
def test_waiting_tenants_stay_within_the_bound(broker: Server, play: Play, steps: list) -> None:
    with TenantYard(broker.url) as yard, pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator.dispatch.tenant_intakes, "PAGE", play.page)
        watch = Watch(yard, play)
        with watch.joining():
            for name, *values in steps:
                if name == "lead":
                    yard.lead()
                else:
                    getattr(watch, name)(*values)
                yard.rest()
                watch.check()
