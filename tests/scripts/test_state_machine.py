"""Random walks over all scripts: in any order, no request is lost and no token repeated.

The machine takes one random step at a time, and compares its model of the yard with the server
after each.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from tests.scripts.model import (
    INTAKES,
    TENANTS,
    OnLane,
    Snapshot,
    check_lanes,
    check_places,
    check_replies,
    check_tenants,
    is_in_place,
)
from tests.scripts.walk import LANE_LIMIT, SEEDS, Walk
from tests.support.effort import examples
from tests.support.servers import Server
from tokenyard.scripts.answers import LostRequest, Why
from tokenyard.scripts.calls import LostLeadership
from tokenyard.scripts.leader import RESCUE_HELD
from tokenyard.scripts.worker import RETIRE_UNKNOWN


class WalkWithMishaps(Walk):
    """Workers and leaders are lost, and entries are deleted by hand."""

    @rule(seed=SEEDS, lapse=st.booleans())
    def mishap(self, seed: random.Random, lapse: bool) -> None:
        """Let a fault happen to a worker, mostly to a busy one, or to the leader."""
        busy = [worker for worker in self.workers if self.yard.lane(worker)]
        worker = seed.choice(busy if busy and seed.random() < 0.9 else sorted(self.workers))
        life = self.workers[worker]
        kind = seed.choice(("rescue", "rescue", "renew", "left", "lost", "crashed", "depose"))
        match kind:
            case "rescue":
                self._rescue(seed, worker, lapse or seed.random() < 0.5)
            case "renew":
                self._renew(worker, lapse)
            case "depose":
                self.old_tokens.append(self.token)
                assert self.scripts.resign(self.token)
                assert self.scripts.lead("other", 600_000, self.token) not in self.old_tokens
                self.token = self.connection.get(self.yard.keys.leader).decode()
                assert self.scripts.lead("late", 600_000, self.old_tokens[-1]) == ""
            case "left" | "lost" | "crashed":
                self._retire(worker, kind)
                if seed.random() < 0.8:
                    self._rescue(seed, worker, lapse=False)
        if not life.holds and sum(other.holds for other in self.workers.values()) < 2:
            self._join()

    @rule(seed=SEEDS)
    def ordeal(self, seed: random.Random) -> None:
        """Run a request alone on a new worker, which is lost before it publishes."""
        waiting = self._waiting()
        if not waiting:
            return
        worker = self._join()
        self._dispatch([seed.choice(waiting).to(worker, LANE_LIMIT, alone=seed.random() < 0.7)])
        self._retire(worker, seed.choice(("left", "lost", "crashed", "crashed")))
        if self.yard.lane(worker):
            self._rescue(seed, worker, lapse=False)

    def _renew(self, worker: str, lapse: bool) -> None:
        if lapse and self.workers[worker].holds:
            self.yard.expire(worker)
        (is_held,) = self.scripts.renew(600_000, [(worker, b"{}")])
        assert is_held is self.workers[worker].holds

    def _retire(self, worker: str, why: Why) -> None:
        life, on_lane = self.workers[worker], self.connection.xlen(self.yard.keys.lane(worker))
        is_known = self.connection.zscore(self.yard.keys.leases, worker) is not None
        left = self.scripts.retire(worker, why, f"it {why}")
        assert is_known or not life.holds
        assert left == (on_lane if is_known else RETIRE_UNKNOWN)
        if life.holds:
            life.holds, life.why = False, why

    def _rescue(self, seed: random.Random, worker: str, lapse: bool) -> None:
        """Rescue a batch of a lane, from nothing to all; only the leader may."""
        life, alone = self.workers[worker], self.yard.alone(worker)
        lane = [
            OnLane(entry, {b"id": b""} | fields)
            for entry, fields in self.connection.xrange(self.yard.keys.lane(worker))
        ]
        if lapse and life.holds:
            self.yard.expire(worker)
        with pytest.raises(LostLeadership):
            self.scripts.rescue(seed.choice(self.old_tokens), worker)
        taken = seed.sample(lane, seed.randint(0, len(lane)))
        entries = [(item.entry.decode(), *item.name) for item in taken]
        left = self.scripts.rescue(self.token, worker, entries)
        if life.holds and not lapse:
            assert left == RESCUE_HELD
            return
        assert left == len(lane) - len(taken)
        life.holds = False
        for item in taken:
            if b"attempt" in item.fields:
                is_alone = item.entry.decode() == alone
                self.known[item.name].suffer(life.why, alone=is_alone)

    # Entries deleted by hand, and their reconciliation

    @precondition(lambda self: self.known)
    @rule(seed=SEEDS, is_trim=st.booleans(), later=st.booleans())
    def delete(self, seed: random.Random, is_trim: bool, later: bool) -> None:
        """Run XDEL or XTRIM on an intake or a lane, mostly on a lane or the retries."""
        retries = self.yard.keys.intake("retry")
        streams = [retries, *(self.yard.keys.lane(worker) for worker in self.workers)]
        filled = [stream for stream in streams if self.connection.xlen(stream)]
        if not filled or seed.random() < 0.3:
            streams = [self.yard.keys.intake(name) for name in INTAKES]
            filled = [stream for stream in streams if self.connection.xlen(stream)]
        if not filled:
            return
        stream = seed.choice(filled)
        if is_trim:
            kept = seed.randint(0, self.connection.xlen(stream) - 1)
            self.connection.xtrim(stream, maxlen=kept, approximate=False)
        else:
            entries = [entry for entry, _ in self.connection.xrange(stream)]
            self.connection.xdel(stream, *seed.sample(entries, seed.randint(1, len(entries))))
        self._read_lanes()
        self._note_deleted()
        self.is_inexact = True
        if not later:
            self._reconcile(seed)

    def _note_deleted(self) -> None:
        """Note the requests without their entry; an unread plain XADD leaves no trace."""
        seen = Snapshot.take(self.yard, self.workers, self.known)
        waiting = {item.name for item in seen.waiting.values()}
        for name in list(self.known):
            known, ledger = self.known[name], seen.ledgers[name]
            if not ledger and name not in waiting:
                del self.known[name]
            elif known.result is None and ledger:
                known.is_astray = not is_in_place(seen, name)

    @rule(seed=SEEDS)
    def reconcile(self, seed: random.Random) -> None:
        self._reconcile(seed)

    def _reconcile(self, seed: random.Random) -> None:
        """Let the leader scan the ledgers and end lost requests; others stay."""
        look = self.scripts.astray(0, 10_000_000)
        assert look.cursor == 0
        found = {(one.client, one.request_id): one for one in look.found}
        astray = {
            name for name, known in self.known.items() if known.is_astray and known.result is None
        }
        assert set(found) == astray
        old = seed.choice(self.old_tokens)
        with pytest.raises(LostLeadership):
            self.scripts.reconcile(old, look.found)
        by_name = sorted(look.found, key=lambda one: (one.client, one.request_id))
        claims = by_name + self._claims(seed)
        seed.shuffle(claims)
        ended = self.scripts.reconcile(
            self.token, claims, excess_tokens=look.queued_tokens - look.tokens
        )
        for claim, has_ended in zip(claims, ended, strict=True):
            name = (claim.client, claim.request_id)
            assert has_ended is (found.get(name) is claim)
            if has_ended:
                known = self.known[name]
                known.result, known.running = ("failed", list(known.published)), None
        for tenant in set(TENANTS.values()):
            self.scripts.recount(self.token, tenant)
        for known in self.known.values():
            known.is_astray = False
        self.is_inexact = False

    def _claims(self, seed: random.Random) -> list[LostRequest]:
        """Claims that requests in their places are lost."""
        found = [
            LostRequest(one.request.client, one.request.id, "waiting", one.intake, one.entry, False)
            for one in self._waiting()
        ]
        for worker in self.workers:
            found += [
                LostRequest(one.request.client, one.request.id, "assigned", worker, one.entry, True)
                for one in self.yard.lane(worker)
            ]
        return seed.sample(found, min(2, len(found)))

    @invariant()
    def yard_is_as_the_model_says(self) -> None:
        seen = Snapshot.take(self.yard, self.workers, self.known)
        check_places(seen, self.known, is_inexact=self.is_inexact)
        check_lanes(seen, self.known, self.workers, LANE_LIMIT, is_inexact=self.is_inexact)
        check_tenants(seen, self.known, is_inexact=self.is_inexact)
        for name, known in self.known.items():
            check_replies(seen, name, known)


def test_a_cancelled_request_pays_what_its_worker_reports_first(broker: Server) -> None:
    walk = type("Walk", (WalkWithMishaps,), {"url": broker.url})()
    walk.open()
    walk.ask(names=[("flat", "a")], plain=False, priority_class="high")
    walk.dispatch(seed=random.Random(1), lost_leadership=False, twice=False)
    walk.cancel(seed=random.Random(0), name=("flat", "a"), early=False, obeyed=False)
    for length in (0, 1):
        walk.finish(seed=random.Random(0), length=length, twice=False)
        assert walk.known["flat", "a"].used == 0
        walk.yard_is_as_the_model_says()
    walk.teardown()


@pytest.mark.hypothesis
@pytest.mark.timeout(600)
def test_random_walks_lose_no_request_and_repeat_no_token(broker: Server) -> None:
    walk = type("Walk", (WalkWithMishaps,), {"url": broker.url})
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=examples(25, deep=200),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
