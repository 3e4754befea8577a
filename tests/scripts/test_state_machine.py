"""Random walks over all scripts: whatever the order, no request is lost and no token repeated.

The machine keeps a model of what should be where, as simple as it can be, takes one random step
at a time, and compares the model with the server after each. Workers act on what they remember,
which may be stale: that is how a worker behaves that was cut off for a while.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.builders import make_delta, make_request, make_result, random_name
from tests.support.servers import Server
from tests.support.yard import Waiting, Yard
from tokenyard.errors import Code
from tokenyard.keys import INTAKE_CLASSES, PRIORITY_CLASSES, Keys
from tokenyard.parse import parse_request
from tokenyard.replies import TERMINAL, refusal
from tokenyard.scripts import (
    RESCUE_HELD,
    RESCUE_NOT_LEADER,
    RETIRE_UNKNOWN,
    Answered,
    Dispatched,
    Publication,
    Published,
    Renewed,
    Scripts,
    Submitted,
)
from tokenyard.wire import Assignment, Request, pack_tokens, request_fields, unpack_tokens

LANE_LIMIT = 3
SEEDS = st.randoms(use_true_random=False)
RARELY = st.sampled_from([False] * 7 + [True])
IDS = ("a", "b/c", "d", "é")
CLIENTS = {"flat": "", "framed": "replies:framed"}


@dataclass
class Known:
    """What the model says of one request."""

    request: Request
    published: list[int] = field(default_factory=list)
    result: tuple[str, list[int]] | None = None
    attempts: int = 0
    crashes: int = 0


@dataclass
class Life:
    """What the model says of one worker incarnation, and all that it ever read on its lane."""

    remembered: list[Assignment] = field(default_factory=list)
    holds: bool = True
    why: str = "lost"


class Walk(RuleBasedStateMachine):
    """One yard; the server is set by the test below."""

    url = ""

    @initialize()
    def open(self) -> None:
        self.connection = redis.Redis.from_url(self.url)
        keys = Keys(random_name("yard"))
        self.yard = Yard(self.connection, keys, Scripts(self.connection, keys))
        self.scripts = self.yard.scripts
        self.token = self.yard.token
        self.old_tokens: list[str] = ["0:nobody"]
        self.known: dict[tuple[str, str], Known] = {}
        self.entries: set[tuple[str, str, str]] = set()  # duplicates may wait beside the one
        self.workers: dict[str, Life] = {}
        for _ in range(2):
            self.join()

    def teardown(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()

    # Clients

    @rule(
        names=st.lists(
            st.tuples(st.sampled_from(sorted(CLIENTS)), st.sampled_from(IDS)),
            min_size=1,
            max_size=4,
        ),
        priority_class=st.sampled_from(PRIORITY_CLASSES),
        plain=st.booleans(),
    )
    def ask(self, names: list[tuple[str, str]], priority_class, plain: bool) -> None:
        """A burst of requests, some of them asked before, by the script or by plain XADDs."""
        burst = [
            make_request(name, client=client, reply_to=CLIENTS[client], stream=True, tokens=[1])
            for client, name in names
        ]
        are_new = [
            name not in self.known and name not in names[:at] for at, name in enumerate(names)
        ]
        for request in burst:
            self.known.setdefault((request.client, request.id), Known(request))
        if plain:
            spoofed = {"published": pack_tokens([6, 6]), "attempt": "9", "sid": "x", "crashes": "9"}
            for request in burst:
                self.yard.push(request_fields(request) | spoofed, request, intake=priority_class)
            return
        answers = self.scripts.submit(priority_class, burst)
        for is_new, answer in zip(are_new, answers, strict=True):
            assert answer.code in (Submitted.ACCEPTED, Submitted.KNOWN)
            assert answer.code is Submitted.ACCEPTED or not is_new

    # The leader

    @rule()
    def change_the_leader(self) -> None:
        self.old_tokens.append(self.token)
        assert self.scripts.resign(self.token)
        self.token = self.scripts.lead("coordinator", 600_000)

    def _waiting(self) -> list[Waiting]:
        found = []
        for name in INTAKE_CLASSES:
            for entry, fields in self.yard.intake(name):
                request = parse_request(fields)
                assert isinstance(request, Request)
                found.append(Waiting(request, name, entry))
        return found

    @precondition(lambda self: self.workers)
    @rule(seed=SEEDS, deposed=RARELY, twice=st.booleans())
    def dispatch(self, seed: random.Random, deposed: bool, twice: bool) -> None:
        """A round over everything that waits, to any workers, also such as are gone."""
        moves = [
            item.to(seed.choice(sorted(self.workers)), LANE_LIMIT)
            for item in self._waiting()
            if seed.random() < 0.8
        ]
        seed.shuffle(moves)
        if deposed:
            old = seed.choice(self.old_tokens)
            assert set(self.scripts.dispatch(old, moves)) <= {Dispatched.NOT_LEADER}
            return
        codes = self.scripts.dispatch(self.token, moves)
        self._read_lanes()
        for move, code in zip(moves, codes, strict=True):
            known, life = self.known[move.client, move.request_id], self.workers[move.worker]
            if code is Dispatched.DISPATCHED:
                assert life.holds
                assert known.result is None
                known.attempts += 1
            elif code is Dispatched.CLOSED:
                assert not life.holds
            else:
                assert code in (Dispatched.DUPLICATE, Dispatched.FULL)
        if twice:  # the answer to the first call was lost
            again = self.scripts.dispatch(self.token, moves)
            assert Dispatched.DISPATCHED not in again

    def _read_lanes(self) -> None:
        for worker, life in self.workers.items():
            life.remembered += [it for it in self.yard.lane(worker) if it not in life.remembered]

    @rule(seed=SEEDS, deposed=RARELY)
    def answer(self, seed: random.Random, deposed: bool) -> None:
        waiting = self._waiting()
        if not waiting:
            return
        item = seed.choice(waiting)
        known = self.known[item.request.client, item.request.id]
        seen = known.published if item.intake == "retry" else []
        reply = refusal(item.request, Code.CANCELLED, "", published=pack_tokens(seen))
        token = seed.choice(self.old_tokens) if deposed else self.token
        code = self.scripts.answer(token, item.intake, item.entry, item.request, reply)
        assert (code is Answered.NOT_LEADER) is deposed
        if code is Answered.DONE:
            assert known.result is None
            known.result = ("failed", list(seen))

    # Workers

    @precondition(lambda self: sum(life.holds for life in self.workers.values()) < 3)
    @rule()
    def join(self) -> None:
        self.workers[self.yard.worker(f"w{len(self.workers) % 2}")] = Life()

    @precondition(lambda self: any(life.remembered for life in self.workers.values()))
    @rule(
        seed=SEEDS,
        lengths=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        shift=st.sampled_from([0, 0, 0, 0, -1, 1]),
        twice=st.booleans(),
    )
    def emit(self, seed: random.Random, lengths: list[int], shift: int, twice: bool) -> None:
        """A step of several deltas by a worker that may have no right to any of them."""
        worker, life = self._someone(seed)
        step: list[Publication] = []
        reached: Counter[tuple[str, str]] = Counter()
        for length in lengths:
            assignment = seed.choice(life.remembered[-LANE_LIMIT:])
            name = (assignment.request.client, assignment.request.id)
            seq = max(0, len(self.known[name].published) + reached[name] + shift)
            tokens = [token_at(name, seq + i) for i in range(length)]
            reached[name] += length if shift == 0 else 0
            step.append(Publication(assignment, make_delta(assignment.request.id, seq, tokens)))
        for _ in range(1 + twice):
            for item, code in zip(step, self.scripts.emit(worker, step), strict=True):
                self._note_emit(worker, life, item, code)

    def _note_emit(self, worker: str, life: Life, item: Publication, code: Published) -> None:
        known = self._of(item)
        assert (code is Published.LEASE_LOST) is not life.holds
        if code is Published.PUBLISHED:
            assert self._may_write(worker, item.assignment)
            assert item.reply.seq == len(known.published)
            known.published += unpack_tokens(item.reply.tokens)
        elif life.holds and not self._may_write(worker, item.assignment):
            assert code is Published.STALE

    @precondition(lambda self: any(life.remembered for life in self.workers.values()))
    @rule(seed=SEEDS, length=st.integers(0, 3), twice=st.booleans())
    def finish(self, seed: random.Random, length: int, twice: bool) -> None:
        worker, life = self._someone(seed)
        chosen = seed.sample(life.remembered, seed.randint(1, min(2, len(life.remembered))))
        step = []
        for assignment in chosen:
            name = (assignment.request.client, assignment.request.id)
            seen = self.known[name].published
            tokens = seen + [token_at(name, len(seen) + i) for i in range(length)]
            reply = make_result(assignment.request.id, tokens, seq=len(seen))
            step.append(Publication(assignment, reply))
        for _ in range(1 + twice):
            for item, code in zip(step, self.scripts.finish(worker, step), strict=True):
                known = self._of(item)
                assert (code is Published.LEASE_LOST) is not life.holds
                if code is Published.PUBLISHED:
                    assert self._may_write(worker, item.assignment)
                    known.result = ("completed", unpack_tokens(item.reply.tokens))
                elif life.holds:
                    assert not self._may_write(worker, item.assignment)

    def _someone(self, seed: random.Random) -> tuple[str, Life]:
        name = seed.choice(sorted(w for w, life in self.workers.items() if life.remembered))
        return name, self.workers[name]

    def _of(self, item: Publication) -> Known:
        request = item.assignment.request
        return self.known[request.client, request.id]

    def _may_write(self, worker: str, assignment: Assignment) -> bool:
        """By the model: whether this attempt is the last, and no result is there."""
        known = self.known[assignment.request.client, assignment.request.id]
        return (
            self.workers[worker].holds
            and known.result is None
            and known.attempts == assignment.attempt
        )

    @precondition(lambda self: self.workers)
    @rule(seed=SEEDS, lapse=st.booleans())
    def renew(self, seed: random.Random, lapse: bool) -> None:
        worker = seed.choice(sorted(self.workers))
        if lapse and self.workers[worker].holds:
            self.yard.expire(worker)
        (code,) = self.scripts.renew(600_000, [(worker, b"{}")])
        assert (code is Renewed.HELD) is self.workers[worker].holds

    @precondition(lambda self: self.workers)
    @rule(seed=SEEDS, why=st.sampled_from(["left", "lost"]))
    def retire(self, seed: random.Random, why) -> None:
        worker = seed.choice(sorted(self.workers))
        life = self.workers[worker]
        left = self.scripts.retire(worker, why)
        if life.holds:
            assert left >= 0
            life.holds, life.why = False, why
        else:
            assert left > 0 or left == RETIRE_UNKNOWN

    @precondition(lambda self: self.workers)
    @rule(
        seed=SEEDS,
        lapse=st.booleans(),
        batch=st.integers(0, 3),
        deposed=RARELY,
    )
    def rescue(self, seed: random.Random, lapse: bool, batch: int, deposed: bool) -> None:
        worker = seed.choice(sorted(self.workers))
        life, lane = self.workers[worker], self.yard.lane(worker)
        if deposed:
            old = seed.choice(self.old_tokens)
            assert self.scripts.rescue(old, worker) == RESCUE_NOT_LEADER
            return
        if lapse and life.holds:
            self.yard.expire(worker)
        taken = seed.sample(lane, min(batch, len(lane)))
        entries = [(item.entry, item.request.client, item.request.id) for item in taken]
        left = self.scripts.rescue(self.token, worker, entries)
        if life.holds and not lapse:
            assert left == RESCUE_HELD
            return
        assert left == len(lane) - len(taken)
        life.holds = False
        for item in taken:
            self.known[item.request.client, item.request.id].crashes += life.why == "lost"

    # What holds after every step

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        on_lanes = Counter(
            (item.request.client, item.request.id)
            for worker in self.workers
            for item in self.yard.lane(worker)
        )
        waiting = {(item.intake, item.entry): item.request for item in self._waiting()}
        names = [(request.client, request.id) for request in waiting.values()]
        for name, known in self.known.items():
            ledger = self.yard.ledger(known.request)
            state = ledger.get("state")
            if known.result is not None:
                assert state in TERMINAL
                assert on_lanes[name] == 0
            elif state == "assigned":
                assert on_lanes[name] == 1
            else:
                assert on_lanes[name] == 0
                if state is None:  # a plain XADD that nobody has looked at
                    assert name in names
                else:
                    assert state == "waiting"
                    at = waiting[ledger["intake"], ledger["entry"]]
                    assert (at.client, at.id) == name

    @invariant()
    def every_assignment_carries_what_its_reader_needs(self) -> None:
        for worker in self.workers:
            for item in self.yard.lane(worker):
                known = self.known[item.request.client, item.request.id]
                ledger = self.yard.ledger(known.request)
                assert item.request == known.request
                assert (item.attempt, item.crashes) == (known.attempts, known.crashes)
                assert (ledger["worker"], ledger["entry"]) == (worker, item.entry)
                assert (ledger["attempt"], ledger["sid"]) == (str(item.attempt), item.sid)
                seen = unpack_tokens(item.published)
                assert known.published[: len(seen)] == seen

    @invariant()
    def every_token_is_published_once_and_every_result(self) -> None:
        for (client, request_id), known in self.known.items():
            replies = [
                reply for reply in self.yard.replies(known.request) if reply.id == request_id
            ]
            deltas = [reply for reply in replies if reply.event == "delta"]
            results = [reply for reply in replies if reply.event == "result"]
            streamed: list[int] = []
            for delta in deltas:
                assert delta.seq == len(streamed)
                streamed += unpack_tokens(delta.tokens)
            assert streamed == known.published
            assert streamed == [token_at((client, request_id), i) for i in range(len(streamed))]
            kept = self.yard.published(known.request)
            if known.result is None:
                assert results == []
                assert kept == pack_tokens(streamed)
                continue
            (result,) = results
            assert replies[-1] == result == self.yard.result(known.request)
            assert (result.status, unpack_tokens(result.tokens)) == known.result
            assert kept == b""

    @invariant()
    def lanes_are_bounded_and_empty_ones_forgotten(self) -> None:
        for worker, life in self.workers.items():
            load = len(self.yard.lane(worker))
            assert load <= LANE_LIMIT
            in_roster = self.connection.hexists(self.yard.keys.workers, worker)
            has_score = self.connection.zscore(self.yard.keys.leases, worker) is not None
            assert in_roster == has_score
            assert in_roster or (not life.holds and load == 0)


def token_at(name: tuple[str, str], at: int) -> int:
    """The token of a request at an offset: the same whoever generates it."""
    return (len(name[0]) * 1000 + ord(name[1][0])) * 1000 + at


@pytest.mark.timeout(300)
def test_random_walks(broker: Server) -> None:
    walk = type("Walk", (Walk,), {"url": broker.url})
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
