"""Random steps of clients, the leader and workers, each compared with a model of the yard.

Workers act on their memory, which may be stale, like a worker after a loss of connection.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.scripts.model import (
    CLIENTS,
    INTAKES,
    Known,
    Life,
    Name,
    OnLane,
    Snapshot,
    ask_for,
    token_at,
)
from tests.support.builders import make_delta, make_result, random_name
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys, Yard, intake_name
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.replies import TERMINAL, refusal
from tokenyard.protocol.wire import Assignment, Request, pack_tokens, request_fields, unpack_tokens
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import (
    Answered,
    Cancelled,
    Charge,
    Dispatched,
    HandedBack,
    Move,
    Publication,
    Published,
    Submitted,
    Transfer,
    Transferred,
)
from tokenyard.scripts.calls import LostLeadership
from tokenyard.scripts.client import cancel, requeue

LANE_LIMIT = 3
# Drawn as one number: separate draws of Hypothesis come mostly from the low end.
FOREVER_MS = 10**15  # deltas are taken on trust up to this time
SEEDS = st.integers(0, 2**32).map(random.Random)
RARELY = st.sampled_from([False] * 7 + [True])
IDS = ("a", "b/c", "d", "é", "e", "f", "g", "h")


class Walk(RuleBasedStateMachine):
    """One yard, on the server that a subclass sets."""

    url = ""

    @initialize()
    def open(self) -> None:
        self.connection = redis.Redis.from_url(self.url)
        keys = Keys(random_name("yard"))
        self.yard = PlayedYard(self.connection, keys, Scripts(Yard(self.connection, keys)))
        self.scripts = self.yard.scripts
        self.token = self.yard.token
        self.old_tokens: list[str] = ["0:nobody"]
        self.known: dict[Name, Known] = {}
        self.is_inexact = False  # entries were deleted, and the leader has not scanned yet
        self.workers: dict[str, Life] = {}
        for _ in range(2):
            self._join()

    def teardown(self) -> None:
        if hasattr(self, "connection"):
            # The scans of the next walk read all keys of the server.
            mine = f"tokenyard:{{{self.yard.keys.yard}}}:*"
            for key in self.connection.scan_iter(mine, count=10_000):
                self.connection.delete(key)
            self.connection.close()

    # Clients

    @rule(
        names=st.lists(
            st.tuples(st.sampled_from(sorted(CLIENTS)), st.sampled_from(IDS)),
            min_size=1,
            max_size=6,
        ),
        priority_class=st.sampled_from(PRIORITY_CLASSES),
        plain=st.booleans(),
    )
    def ask(self, names: list[Name], priority_class, plain: bool) -> None:
        """Submit requests, some of them known, by the script or by plain XADDs."""
        burst = [ask_for(name) for name in names]
        are_new = [
            name not in self.known and name not in names[:at] for at, name in enumerate(names)
        ]
        for request in burst:
            self.known.setdefault((request.client, request.id), Known(request))
        if plain:
            spoofed = {"published": pack_tokens([6, 6]), "attempt": "9", "sid": "x", "crashes": "9"}
            spoofed["epoch"] = "9"
            for request in burst:
                self.yard.push(request_fields(request) | spoofed, request, intake=priority_class)
            return
        for tenant in {request.tenant for request in burst}:
            own = [request for request in burst if request.tenant == tenant]
            new = [is_new for is_new, one in zip(are_new, burst, strict=True) if one in own]
            answers = self.scripts.submit(priority_class, own)
            for is_new, answer in zip(new, answers, strict=True):
                assert answer.code in (Submitted.ACCEPTED, Submitted.KNOWN)
                assert answer.code is Submitted.ACCEPTED or not is_new

    @precondition(lambda self: self.known)
    @rule(seed=SEEDS, plain=st.booleans())
    def reuse(self, seed: random.Random, plain: bool) -> None:
        """Submit another request under an id that has a ledger."""
        known = seed.choice(list(self.known.values()))
        ledger = self.yard.ledger(known.request)
        if not ledger:
            return
        other = msgspec.structs.replace(known.request, model="another")
        if plain:
            self.yard.push(request_fields(other), other)
            return
        (answer,) = self.scripts.submit("normal", [other])
        has_digest = bool(ledger.get("digest"))
        assert answer.code is (Submitted.REUSED if has_digest else Submitted.KNOWN)
        assert self.yard.ledger(known.request) == ledger

    # The leader

    def _waiting(self) -> list[QueuedRequest]:
        found = []
        for name in INTAKES:
            for entry, fields in self.yard.intake(name):
                request = parse_request(fields)
                assert isinstance(request, Request)
                found.append(QueuedRequest(request, name, entry))
        return found

    @precondition(lambda self: self.workers)
    @rule(seed=SEEDS, lost_leadership=RARELY, twice=st.booleans())
    def dispatch(self, seed: random.Random, lost_leadership: bool, twice: bool) -> None:
        """Dispatch all waiting requests to any workers, also to lost ones."""
        alive = [worker for worker, life in self.workers.items() if life.holds]
        moves = [
            item.to(
                seed.choice(alive * 3 + list(self.workers)),
                LANE_LIMIT,
                alone=seed.random() < 0.2,
            )
            for item in self._waiting()
            if seed.random() < 0.8
        ]
        seed.shuffle(moves)
        if lost_leadership:
            old = seed.choice(self.old_tokens)
            with pytest.raises(LostLeadership):
                self.scripts.dispatch(old, moves)
            return
        self._dispatch(moves)
        if twice:  # the answer to the first call was lost
            again = self.scripts.dispatch(self.token, moves)
            assert Dispatched.DISPATCHED not in again

    def _dispatch(self, moves: list[Move]) -> list[Dispatched]:
        moves = [self._charged(move) for move in moves]
        codes = self.scripts.dispatch(self.token, moves)
        self._read_lanes()
        for move, code in zip(moves, codes, strict=True):
            known, life = self.known[move.client, move.request_id], self.workers[move.worker]
            if code is Dispatched.DISPATCHED:
                assert life.holds
                assert known.result is None
                assert move.digest == request_digest(known.request)
                known.attempts += 1
                known.running = (move.worker, known.attempts)
                known.published_at_start = len(known.published)
            elif code is Dispatched.CLOSED:
                assert not life.holds
            elif code is Dispatched.REUSED:
                assert move.digest != request_digest(known.request)
            else:
                assert code in (Dispatched.DUPLICATE, Dispatched.FULL)
        left = {(item.intake, item.entry) for item in self._waiting()}
        for move, code in zip(moves, codes, strict=True):
            stays = code in (Dispatched.CLOSED, Dispatched.FULL, Dispatched.REUSED)
            assert ((move.intake, move.entry) in left) is stays
        return codes

    def _charged(self, move: Move) -> Move:
        """With what it counts for its tenant, if it has one."""
        tenant = self.known[move.client, move.request_id].request.tenant
        charge = Charge(tenant, 30.0) if tenant else None
        return msgspec.structs.replace(move, charge=charge)

    @rule(seed=SEEDS, lost_leadership=RARELY)
    def transfer(self, seed: random.Random, lost_leadership: bool) -> None:
        """Move plain entries with a tenant to its intakes, some twice."""
        for name in PRIORITY_CLASSES:
            found = [
                Transfer(one.entry, one.request.tenant, one.request.client, one.request.id)
                for one in self._waiting()
                if one.intake == name and one.request.tenant and seed.random() < 0.8
            ]
            if lost_leadership:
                old = seed.choice(self.old_tokens)
                with pytest.raises(LostLeadership):
                    self.scripts.transfer(old, name, found)
                continue
            answers = self.scripts.transfer(self.token, name, [*found, *found[:1]])
            codes = [answer.code for answer in answers]
            assert codes == [Transferred.MOVED] * len(found) + [Transferred.GONE] * bool(found)

    def _read_lanes(self) -> None:
        for worker, life in self.workers.items():
            life.remembered += [it for it in self.yard.lane(worker) if it not in life.remembered]

    @rule(seed=SEEDS, lost_leadership=RARELY, dead=st.booleans())
    def answer(self, seed: random.Random, lost_leadership: bool, dead: bool) -> None:
        waiting = self._waiting()
        if not waiting or seed.random() < 0.5:
            return
        item = seed.choice(waiting)
        known = self.known[item.request.client, item.request.id]
        seen = known.published if item.intake == "retry" else []
        reply = refusal(item.request, Code.POISONED, "", published=pack_tokens(seen))
        call = (item.intake, item.entry, item.request, reply)
        reason = "x" if dead else ""
        if lost_leadership:
            with pytest.raises(LostLeadership):
                self.scripts.answer(seed.choice(self.old_tokens), *call, dead=reason)
            return
        code = self.scripts.answer(self.token, *call, dead=reason)
        if code is Answered.DONE:
            assert known.result is None
            known.result = ("failed", list(seen))

    # Cancels and requeues

    @rule(
        seed=SEEDS,
        name=st.tuples(st.sampled_from(sorted(CLIENTS)), st.sampled_from(IDS)),
        early=RARELY,
        obeyed=st.booleans(),
    )
    def cancel(self, seed: random.Random, name: Name, early: bool, obeyed: bool) -> None:
        """Cancel a request, perhaps an ended one, rarely an unknown one."""
        open_ = [one for one, known in self.known.items() if known.result is None]
        if not early:
            if not open_ or seed.random() < 0.5:
                return
            name = seed.choice(open_)
        keys, ledger = self.yard.keys, self.yard.keys.ledger(*name)
        state = (self.connection.hget(ledger, "state") or b"").decode()
        if state in ("waiting", "assigned"):  # the caller's read is older than this state
            late = cancel(keys, *name, state="assigned", where="nobody.1")
            assert self.scripts.call(late) is Cancelled.MOVED
        code = self.scripts.cancel(*name, "changed my mind")
        known = self.known.setdefault(name, Known(ask_for(name)))
        if state in TERMINAL:
            assert code is Cancelled.OVER
            return
        assert code is (Cancelled.CANCELLED if state else Cancelled.CANCELLED_BEFORE_ARRIVAL)
        assert known.result is None
        known.result, known.ran_at_cancel = ("cancelled", list(known.published)), known.running
        known.running = None
        known.is_cancelled_early = not state
        assert self.scripts.cancel(*name, "") is Cancelled.OVER
        if obeyed:
            self._obey()

    def _obey(self) -> None:
        """Let all workers read their cancels, and take those entries off their lanes."""
        for worker in self.workers:
            lane = self.yard.keys.lane(worker)
            for entry, fields in self.connection.xrange(lane):
                if b"attempt" not in fields:
                    self.connection.xdel(lane, entry)

    @rule(seed=SEEDS, priority_class=st.sampled_from(PRIORITY_CLASSES))
    def requeue(self, seed: random.Random, priority_class) -> None:
        letters = self.connection.xrange(self.yard.keys.dead)
        if not letters:
            return
        letter, fields = seed.choice(letters)
        name = OnLane(letter, fields).name
        known = self.known[name]
        intake = intake_name(priority_class, known.request.tenant)
        again = requeue(self.yard.keys, letter.decode(), *name, intake)
        replies = len(Snapshot.take(self.yard, (), {name: known}).replies[name])
        sid = self.scripts.call(again)
        assert bool(sid) is (known.result is not None)
        if sid:
            known.live_again(replies if known.request.reply_to else 0)
            assert self.scripts.call(again) == ""

    # Workers

    @precondition(lambda self: any(life.remembered for life in self.workers.values()))
    @rule(seed=SEEDS, pause_ms=st.sampled_from([0, 1000]))
    def hand_back(self, seed: random.Random, pause_ms: int) -> None:
        """Hand a request back after a fault; perhaps another worker holds it by now."""
        worker, life = self._someone(seed)
        assignment = seed.choice(life.remembered[-LANE_LIMIT:])
        known = self.known[assignment.request.client, assignment.request.id]
        may = self._may_write(worker, assignment) and not known.is_astray
        code = self.scripts.hand_back(worker, assignment, pause_ms, "no memory")
        if not life.holds:
            assert code is HandedBack.LEASE_LOST
            return
        assert code is (HandedBack.HANDED_BACK if may else HandedBack.STALE)
        if may:
            known.history["faults"] += 1
            known.running = known.compared = None
        assert self.scripts.hand_back(worker, assignment, 0, "x") is HandedBack.STALE

    def _join(self) -> str:
        worker = self.yard.worker(f"w{len(self.workers) % 2}")
        self.workers[worker] = Life()
        return worker

    @precondition(lambda self: any(life.remembered for life in self.workers.values()))
    @rule(
        seed=SEEDS,
        lengths=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        shift=st.sampled_from([0, 0, 0, 0, -1, 1]),
        twice=st.booleans(),
    )
    def emit(self, seed: random.Random, lengths: list[int], shift: int, twice: bool) -> None:
        """Emit a step of several deltas, perhaps by a worker that holds none of the requests."""
        worker, life = self._someone(seed)
        step: list[Publication] = []
        reached: Counter[Name] = Counter()
        for length in lengths:
            assignment = seed.choice(life.remembered[-LANE_LIMIT:])
            name = (assignment.request.client, assignment.request.id)
            seq = max(0, len(self.known[name].published) + reached[name] + shift)
            tokens = [token_at(name, seq + i) for i in range(length)]
            reached[name] += length if shift == 0 else 0
            delta = make_delta(assignment.request.id, seq, tokens)
            is_trusted = self.known[name].compared == (worker, assignment.attempt)
            step.append(Publication(assignment, delta, is_trusted=is_trusted))
        codes = self.scripts.emit(worker, step, FOREVER_MS)
        for item, code in zip(step, codes, strict=True):
            self._note_emit(worker, life, item, code)
        if twice:  # the answer to the first call was lost
            once_more = {Published.PUBLISHED: Published.REPEATED}
            expected = [once_more.get(code, code) for code in codes]
            assert self.scripts.emit(worker, step, FOREVER_MS) == expected

    def _note_emit(self, worker: str, life: Life, item: Publication, code: Published) -> None:
        known = self._of(item)
        assert (code is Published.LEASE_LOST) is not life.holds
        if code is Published.PUBLISHED:
            assert self._may_write(worker, item.assignment)
            assert item.reply.seq == len(known.published)
            known.published += unpack_tokens(item.reply.tokens)
            known.compared = (worker, item.assignment.attempt)
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
                    attempt = (worker, item.assignment.attempt)
                    if known.ran_at_cancel == attempt and known.used is None:
                        known.used = len(unpack_tokens(item.reply.tokens))

    def _someone(self, seed: random.Random) -> tuple[str, Life]:
        name = seed.choice(sorted(w for w, life in self.workers.items() if life.remembered))
        return name, self.workers[name]

    def _of(self, item: Publication) -> Known:
        request = item.assignment.request
        return self.known[request.client, request.id]

    def _may_write(self, worker: str, assignment: Assignment) -> bool:
        """Whether the model says that this attempt runs and has no result."""
        known = self.known[assignment.request.client, assignment.request.id]
        return (
            self.workers[worker].holds
            and known.result is None
            and known.running == (worker, assignment.attempt)
        )
