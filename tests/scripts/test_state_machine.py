"""Random walks over all scripts: in any order, no request is lost and no token repeated.

The machine maintains a simple model of the yard, takes one random step
at a time, and compares the model with the server after each. Workers act on their memory,
which may be stale, like a worker after a loss of connection.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec
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

from tests.scripts.model import HISTORY, Known, Life, Name, OnLane, Snapshot
from tests.support.builders import make_delta, make_request, make_result, random_name
from tests.support.effort import examples
from tests.support.servers import Server
from tests.support.yard import QueuedRequest, Yard
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import INTAKE_CLASSES, PRIORITY_CLASSES, Keys
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.replies import TERMINAL, decode_reply, refusal
from tokenyard.protocol.wire import (
    Assignment,
    Request,
    pack_tokens,
    prompt_value,
    request_fields,
    unpack_tokens,
)
from tokenyard.scripts import (
    RESCUE_HELD,
    RESCUE_NOT_LEADER,
    RETIRE_UNKNOWN,
    Answered,
    Cancelled,
    Dispatched,
    HandedBack,
    LostRequest,
    Move,
    Publication,
    Published,
    Reconciled,
    Renewed,
    Scripts,
    Submitted,
    Why,
    cancel,
    requeue,
    waits_at,
)

LANE_LIMIT = 3
# Drawn as one number: separate draws of Hypothesis come mostly from the low end.
SEEDS = st.integers(0, 2**32).map(random.Random)
RARELY = st.sampled_from([False] * 7 + [True])
IDS = ("a", "b/c", "d", "é", "e", "f", "g", "h")
CLIENTS = {"flat": "", "framed": "replies:framed"}


class Walk(RuleBasedStateMachine):
    """One yard; the test below sets the server."""

    url = ""

    @initialize()
    def open(self) -> None:
        self.connection = redis.Redis.from_url(self.url)
        keys = Keys(random_name("yard"))
        self.yard = Yard(self.connection, keys, Scripts(self.connection, keys))
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
        answers = self.scripts.submit(priority_class, burst)
        for is_new, answer in zip(are_new, answers, strict=True):
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
        for name in INTAKE_CLASSES:
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
            assert set(self.scripts.dispatch(old, moves)) <= {Dispatched.NOT_LEADER}
            return
        self._dispatch(moves)
        if twice:  # the answer to the first call was lost
            again = self.scripts.dispatch(self.token, moves)
            assert Dispatched.DISPATCHED not in again

    def _dispatch(self, moves: list[Move]) -> list[Dispatched]:
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
        token = seed.choice(self.old_tokens) if lost_leadership else self.token
        code = self.scripts.answer(
            token, item.intake, item.entry, item.request, reply, dead="x" if dead else ""
        )
        assert (code is Answered.NOT_LEADER) is lost_leadership
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
        known.result, known.running = ("cancelled", list(known.published)), None
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
        again = requeue(self.yard.keys, letter.decode(), *name, priority_class)
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
            known.running = None
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
            step.append(Publication(assignment, make_delta(assignment.request.id, seq, tokens)))
        codes = self.scripts.emit(worker, step)
        for item, code in zip(step, codes, strict=True):
            self._note_emit(worker, life, item, code)
        if twice:  # the answer to the first call was lost
            once_more = {Published.PUBLISHED: Published.REPEATED}
            expected = [once_more.get(code, code) for code in codes]
            assert self.scripts.emit(worker, step) == expected

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
        """Whether the model says that this attempt runs and has no result."""
        known = self.known[assignment.request.client, assignment.request.id]
        return (
            self.workers[worker].holds
            and known.result is None
            and known.running == (worker, assignment.attempt)
        )

    # Mishaps

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
        (code,) = self.scripts.renew(600_000, [(worker, b"{}")])
        assert (code is Renewed.HELD) is self.workers[worker].holds

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
        assert self.scripts.rescue(seed.choice(self.old_tokens), worker) == RESCUE_NOT_LEADER
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
            streams = [self.yard.keys.intake(name) for name in INTAKE_CLASSES]
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
        assert set(self.scripts.reconcile(old, look.found)) == {Reconciled.NOT_LEADER}
        by_name = sorted(look.found, key=lambda one: (one.client, one.request_id))
        claims = by_name + self._claims(seed)
        seed.shuffle(claims)
        codes = self.scripts.reconcile(
            self.token, claims, excess_tokens=look.queued_tokens - look.tokens
        )
        for claim, code in zip(claims, codes[: len(claims)], strict=True):
            name = (claim.client, claim.request_id)
            assert (code is Reconciled.ENDED) is (found.get(name) is claim)
            if code is Reconciled.ENDED:
                known = self.known[name]
                known.result, known.running = ("failed", list(known.published)), None
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

    # Invariants

    @invariant()
    def yard_is_as_the_model_says(self) -> None:
        seen = Snapshot.take(self.yard, self.workers, self.known)
        self._check_places(seen)
        self._check_lanes(seen)
        for name in self.known:
            self._check_replies(seen, name)

    def _check_places(self, seen: Snapshot) -> None:
        """Every request is in exactly one place: an intake, a lane, or answered."""
        on_lanes = Counter(item.name for lane in seen.lanes.values() for item in lane)
        waiting_names = {item.name for item in seen.waiting.values()}
        queued = 0
        for name, known in self.known.items():
            ledger = seen.ledgers[name]
            state = ledger.get(b"state", b"").decode()
            if known.result is not None:
                assert state in TERMINAL
                assert on_lanes[name] == 0
            elif known.is_astray:
                assert on_lanes[name] == 0
                assert not is_in_place(seen, name)
            elif state == "assigned":
                assert on_lanes[name] == 1
            else:
                assert on_lanes[name] == 0
                if not state:  # an unread plain XADD
                    assert name in waiting_names
                else:
                    assert state == "waiting"
                    names = (b"sid", b"intake", b"entry")
                    intake, entry = waits_at(*(ledger.get(at, b"").decode() for at in names))
                    item = seen.waiting[intake.encode(), entry.encode()]
                    assert item.name == name
                    if intake == "retry":
                        self._check_retry(item, known)
                    else:
                        queued += max(1, len(prompt_value(known.request)) // 4)
        # The leader's scan corrects the count.
        assert self.is_inexact or seen.queued_tokens == queued

    def _check_retry(self, item: OnLane, known: Known) -> None:
        """A retry has its history and its published tokens."""
        history = {name: int(item.fields.get(name.encode(), b"0")) for name in HISTORY}
        assert history == known.history
        assert unpack_tokens(item.fields.get(b"published", b"")) == known.published

    def _check_lanes(self, seen: Snapshot) -> None:
        """A lane is bounded, belongs to one worker, and has the facts for the next attempt."""
        for worker, lane in seen.lanes.items():
            assert len(lane) <= LANE_LIMIT
            alone = seen.quarantine.get(worker.encode())
            if alone and self.workers[worker].holds and not self.is_inexact:
                assert [item.entry for item in lane] == [alone]
            is_known = worker.encode() in seen.leases
            assert is_known == (worker.encode() in seen.roster)
            assert is_known or (not self.workers[worker].holds and not lane)
            for item in lane:
                known, ledger = self.known[item.name], seen.ledgers[item.name]
                fields = item.fields
                assert parse_request(fields) == known.request
                assert fields[b"attempt"] == str(known.attempts).encode() == ledger[b"attempt"]
                assert known.running == (worker, known.attempts)
                for count in ("crashes", "faults"):
                    assert fields.get(count.encode(), b"0") == str(known.history[count]).encode()
                assert fields[b"sid"] == ledger[b"sid"]
                assert (ledger[b"worker"], ledger[b"entry"]) == (worker.encode(), item.entry)
                published = unpack_tokens(fields.get(b"published", b""))
                assert published == known.published[: len(published)]
                assert len(published) == known.published_at_start

    def _check_replies(self, seen: Snapshot, name: Name) -> None:
        """Every token is published once, in order, with one result at the end."""
        known, streamed = self.known[name], list[int]()
        replies = seen.replies[name][known.replies_before :]
        results = [reply for reply in replies if reply.event == "result"]
        for reply in replies:
            if reply.event == "delta":
                assert reply.seq == len(streamed)
                streamed += unpack_tokens(reply.tokens)
        assert streamed == known.published
        assert streamed == [token_at(name, at) for at in range(len(streamed))]
        if known.result is None:
            assert results == []
            assert seen.tokens[name] == pack_tokens(streamed)
            return
        (result,) = results
        assert replies[-1] == result == decode_reply(seen.ledgers[name][b"result"])
        assert (result.status, unpack_tokens(result.tokens)) == known.result
        assert seen.tokens[name] == b""


def ask_for(name: Name) -> Request:
    """The request of a name, always the same."""
    client, request_id = name
    return make_request(
        request_id, client=client, reply_to=CLIENTS[client], stream=True, tokens=range(9)
    )


def is_in_place(seen: Snapshot, name: Name) -> bool:
    """Whether the entry that a ledger names exists."""
    ledger = seen.ledgers[name]
    if ledger[b"state"] == b"assigned":
        lane = seen.lanes[ledger[b"worker"].decode()]
        return ledger[b"entry"] in {item.entry for item in lane}
    names = (b"sid", b"intake", b"entry")
    intake, entry = waits_at(*(ledger.get(at, b"").decode() for at in names))
    return (intake.encode(), entry.encode()) in seen.waiting


def token_at(name: Name, at: int) -> int:
    """The token of a request at an offset, the same from every worker."""
    return (len(name[0]) * 1000 + ord(name[1][0])) * 1000 + at


@pytest.mark.hypothesis
@pytest.mark.timeout(600)
def test_random_walks_lose_no_request_and_repeat_no_token(broker: Server) -> None:
    walk = type("Walk", (Walk,), {"url": broker.url})
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=examples(25, deep=200),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
