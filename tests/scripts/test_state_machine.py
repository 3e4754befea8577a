"""Random walks over all scripts: whatever the order, no request is lost and no token repeated.

The machine keeps a model of what should be where, as simple as it can be, takes one random step
at a time, and compares the model with the server after each. Workers act on what they remember,
which may be stale: that is how a worker behaves that was cut off for a while.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Self

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
from tokenyard.replies import TERMINAL, Reply, decode_replies, decode_reply, refusal
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
    destination,
)
from tokenyard.wire import Assignment, Request, pack_tokens, request_fields, unpack_tokens

LANE_LIMIT = 3
Name = tuple[str, str]  # of a request: client and id
# Drawn as a number: what Hypothesis draws one by one comes mostly from the low end.
SEEDS = st.integers(0, 2**32).map(random.Random)
RARELY = st.sampled_from([False] * 7 + [True])
IDS = ("a", "b/c", "d", "é", "e", "f", "g", "h")
CLIENTS = {"flat": "", "framed": "replies:framed"}


@dataclass
class Known:
    """What the model says of one request."""

    request: Request
    published: list[int] = field(default_factory=list)
    result: tuple[str, list[int]] | None = None
    published_at_start: int = 0  # of the last attempt
    attempts: int = 0
    crashes: int = 0


@dataclass
class Life:
    """What the model says of one worker incarnation, and all that it ever read on its lane."""

    remembered: list[Assignment] = field(default_factory=list)
    holds: bool = True
    why: str = "lost"


@dataclass
class OnLane:
    """An assignment as it stands on a lane."""

    entry: bytes
    fields: dict[bytes, bytes]

    @property
    def name(self) -> Name:
        """Whose it is."""
        return self.fields.get(b"client", b"anon").decode(), self.fields[b"id"].decode()


@dataclass
class Snapshot:
    """All that is in the yard, read in one round trip."""

    waiting: dict[tuple[bytes, bytes], Name]  # by intake and entry
    lanes: dict[str, list[OnLane]]
    ledgers: dict[Name, dict[bytes, bytes]]
    tokens: dict[Name, bytes]
    replies: dict[Name, list[Reply]]
    leases: set[bytes]
    roster: set[bytes]

    @classmethod
    def take(cls, yard: Yard, workers: Iterable[str], known: dict[Name, Known]) -> Self:
        """Read everything."""
        workers, keys = list(workers), yard.keys
        with yard.connection.pipeline(transaction=False) as pipe:
            pipe.zrange(keys.leases, 0, -1)
            pipe.hkeys(keys.workers)
            for intake in INTAKE_CLASSES:
                pipe.xrange(keys.intake(intake))
            for worker in workers:
                pipe.xrange(keys.lane(worker))
            for name, item in known.items():
                pipe.hgetall(keys.ledger(*name))
                pipe.get(keys.tokens(*name))
                pipe.xrange(destination(keys, item.request))
            answers = iter(pipe.execute())
        seen = cls({}, {}, {}, {}, {}, set(next(answers)), set(next(answers)))
        for intake in INTAKE_CLASSES:
            for entry, fields in next(answers):
                seen.waiting[intake.encode(), entry] = OnLane(entry, fields).name
        for worker in workers:
            seen.lanes[worker] = [OnLane(*entry) for entry in next(answers)]
        for name in known:
            seen.ledgers[name] = next(answers)
            seen.tokens[name] = next(answers) or b""
            seen.replies[name] = [
                reply for _, fields in next(answers) for reply in decode_replies(fields)
            ]
        return seen


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
        self.known: dict[Name, Known] = {}
        self.workers: dict[str, Life] = {}
        for _ in range(2):
            self._join()

    def teardown(self) -> None:
        if hasattr(self, "connection"):
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
        alive = [worker for worker, life in self.workers.items() if life.holds]
        moves = [
            item.to(seed.choice(alive * 3 + list(self.workers)), LANE_LIMIT)
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
                known.published_at_start = len(known.published)
            elif code is Dispatched.CLOSED:
                assert not life.holds
            else:
                assert code in (Dispatched.DUPLICATE, Dispatched.FULL)
        left = {(item.intake, item.entry) for item in self._waiting()}
        for move, code in zip(moves, codes, strict=True):
            stays = code in (Dispatched.CLOSED, Dispatched.FULL)
            assert ((move.intake, move.entry) in left) is stays
        if twice:  # the answer to the first call was lost
            again = self.scripts.dispatch(self.token, moves)
            assert Dispatched.DISPATCHED not in again

    def _read_lanes(self) -> None:
        for worker, life in self.workers.items():
            life.remembered += [it for it in self.yard.lane(worker) if it not in life.remembered]

    @rule(seed=SEEDS, deposed=RARELY)
    def answer(self, seed: random.Random, deposed: bool) -> None:
        waiting = self._waiting()
        if not waiting or seed.random() < 0.5:
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

    def _join(self) -> None:
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
        """By the model: whether this attempt is the last, and no result is there."""
        known = self.known[assignment.request.client, assignment.request.id]
        return (
            self.workers[worker].holds
            and known.result is None
            and known.attempts == assignment.attempt
        )

    # Mishaps

    @rule(
        seed=SEEDS,
        kind=st.sampled_from(["rescue", "rescue", "rescue", "renew", "leave", "die", "depose"]),
        lapse=st.booleans(),
    )
    def mishap(self, seed: random.Random, kind: str, lapse: bool) -> None:
        """Something happens to a worker, mostly to one that has work, or to the leader."""
        busy = [worker for worker in self.workers if self.yard.lane(worker)]
        worker = seed.choice(busy if busy and seed.random() < 0.8 else sorted(self.workers))
        life = self.workers[worker]
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
            case _:
                self._retire(worker, "left" if kind == "leave" else "lost")
        if not life.holds and sum(other.holds for other in self.workers.values()) < 2:
            self._join()

    def _renew(self, worker: str, lapse: bool) -> None:
        if lapse and self.workers[worker].holds:
            self.yard.expire(worker)
        (code,) = self.scripts.renew(600_000, [(worker, b"{}")])
        assert (code is Renewed.HELD) is self.workers[worker].holds

    def _retire(self, worker: str, why: Literal["left", "lost"]) -> None:
        life = self.workers[worker]
        left = self.scripts.retire(worker, why)
        if life.holds:
            assert left >= 0
            life.holds, life.why = False, why
        else:
            assert left > 0 or left == RETIRE_UNKNOWN

    def _rescue(self, seed: random.Random, worker: str, lapse: bool) -> None:
        """A batch of a lane, from nothing to all of it; only the leader may."""
        life, lane = self.workers[worker], self.yard.lane(worker)
        if lapse and life.holds:
            self.yard.expire(worker)
        assert self.scripts.rescue(seed.choice(self.old_tokens), worker) == RESCUE_NOT_LEADER
        taken = seed.sample(lane, seed.randint(0, len(lane)))
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
    def yard_is_as_the_model_says(self) -> None:
        seen = Snapshot.take(self.yard, self.workers, self.known)
        self._check_places(seen)
        self._check_lanes(seen)
        for name in self.known:
            self._check_replies(seen, name)

    def _check_places(self, seen: Snapshot) -> None:
        """Every request is in exactly one place: an intake, one lane, or answered."""
        on_lanes = Counter(item.name for lane in seen.lanes.values() for item in lane)
        waiting_names = set(seen.waiting.values())
        for name, known in self.known.items():
            ledger = seen.ledgers[name]
            state = ledger.get(b"state", b"").decode()
            if known.result is not None:
                assert state in TERMINAL
                assert on_lanes[name] == 0
            elif state == "assigned":
                assert on_lanes[name] == 1
            else:
                assert on_lanes[name] == 0
                if not state:  # a plain XADD that nobody has looked at
                    assert name in waiting_names
                else:
                    assert state == "waiting"
                    assert seen.waiting[ledger[b"intake"], ledger[b"entry"]] == name

    def _check_lanes(self, seen: Snapshot) -> None:
        """A lane is bounded, is its worker's alone, and says what the next attempt must know."""
        for worker, lane in seen.lanes.items():
            assert len(lane) <= LANE_LIMIT
            is_known = worker.encode() in seen.leases
            assert is_known == (worker.encode() in seen.roster)
            assert is_known or (not self.workers[worker].holds and not lane)
            for item in lane:
                known, ledger = self.known[item.name], seen.ledgers[item.name]
                fields = item.fields
                assert parse_request(fields) == known.request
                assert fields[b"attempt"] == str(known.attempts).encode() == ledger[b"attempt"]
                assert fields[b"crashes"] == str(known.crashes).encode()
                assert fields[b"sid"] == ledger[b"sid"]
                assert (ledger[b"worker"], ledger[b"entry"]) == (worker.encode(), item.entry)
                published = unpack_tokens(fields.get(b"published", b""))
                assert published == known.published[: len(published)]
                assert len(published) == known.published_at_start

    def _check_replies(self, seen: Snapshot, name: Name) -> None:
        """Every token is published once, in order, and one result at the end."""
        known, streamed = self.known[name], list[int]()
        replies = [reply for reply in seen.replies[name] if reply.id == name[1]]
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


def token_at(name: Name, at: int) -> int:
    """The token of a request at an offset: the same whoever generates it."""
    return (len(name[0]) * 1000 + ord(name[1][0])) * 1000 + at


@pytest.mark.timeout(300)
def test_random_walks(broker: Server) -> None:
    walk = type("Walk", (Walk,), {"url": broker.url})
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
