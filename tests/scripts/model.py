"""The model of a yard that the random walks maintain, and its comparison with the real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.keys import (
    INTAKE_CLASSES,
    PRIORITY_CLASSES,
    TENANTS_QUEUED_TOKENS,
    TENANTS_WAITING,
    intake_name,
    split_intake,
)
from tokenyard.protocol.parse import parse_request, unfold
from tokenyard.protocol.replies import TERMINAL, Reply, decode_replies, decode_reply
from tokenyard.protocol.wire import Assignment, Request, pack_tokens, prompt_value, unpack_tokens
from tokenyard.scripts.answers import Why
from tokenyard.scripts.calls import destination
from tokenyard.scripts.client import waits_at

Name = tuple[str, str]  # of a request: client and id
CLIENTS = {"flat": "", "framed": "replies:framed"}
#: Whose the requests with these ids are; others have no tenant.
TENANTS = {"a": "acme", "b/c": "acme", "d": "zeta"}
INTAKES = (
    *INTAKE_CLASSES,
    *(intake_name(name, tenant) for tenant in ("acme", "zeta") for name in PRIORITY_CLASSES),
)
#: Counts that only the system writes, and those that a retry carries.
HISTORY = ("crashes", "suspected", "crashed_alone", "lost_alone", "faults")


@dataclass
class Known:
    """The model of one request."""

    request: Request
    published: list[int] = field(default_factory=list)
    result: tuple[str, list[int]] | None = None
    published_at_start: int = 0  # of the last attempt
    attempts: int = 0
    running: tuple[str, int] | None = None  # worker and attempt
    history: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HISTORY, 0))
    replies_before: int = 0  # of the lives before it was a dead letter
    paid_before: int = 0  # tokens of the results of those lives
    is_astray: bool = False  # its entry was deleted by hand
    is_cancelled_early: bool = False  # cancelled before its arrival
    ran_at_cancel: tuple[str, int] | None = None  # worker and attempt
    compared: tuple[str, int] | None = None  # worker and attempt whose deltas are taken on trust
    used: int | None = None  # tokens that its engine had made, by the first report after the cancel

    def suffer(self, why: Why, *, alone: bool) -> None:
        """Note that its worker is lost or has left."""
        self.running = None
        if why == "left":
            return
        self.history["crashes"] += 1
        self.history["suspected"] += why == "crashed"
        if alone:
            self.history[f"{why}_alone"] += 1

    @property
    def paid(self) -> int:
        """Tokens of all its results."""
        shown = len(self.result[1]) if self.result else 0
        return self.paid_before + max(shown, self.used or 0)

    def live_again(self, replies_before: int) -> None:
        """Note that the dead letter waits again."""
        self.paid_before = self.paid
        self.published, self.result, self.running = [], None, None
        self.is_astray, self.ran_at_cancel, self.used = False, None, None
        self.compared = None  # that takes longer than trust lasts
        self.history = dict.fromkeys(HISTORY, 0)
        self.replies_before = replies_before


@dataclass
class Life:
    """The model of one worker incarnation, and all that it ever read on its lane."""

    remembered: list[Assignment] = field(default_factory=list)
    holds: bool = True
    why: Why = "lost"


@dataclass
class OnLane:
    """An assignment as a lane has it."""

    entry: bytes
    fields: dict[bytes, bytes]

    @property
    def name(self) -> Name:
        """Client and id of its request."""
        fields = unfold(self.fields)
        return fields.get(b"client", b"anon").decode(), fields[b"id"].decode()


@dataclass
class TenantSnapshot:
    """What the yard has counted for a tenant."""

    counts: dict[str, int]
    output: int  # tokens
    service: float


@dataclass
class Snapshot:
    """The whole state of the yard, read in one round trip."""

    leases: set[bytes]
    roster: set[bytes]
    quarantine: dict[bytes, bytes]
    queued_tokens: int
    tenants_queued_tokens: int
    waiting: dict[tuple[bytes, bytes], OnLane] = field(default_factory=dict)  # intake and entry
    lanes: dict[str, list[OnLane]] = field(default_factory=dict)
    ledgers: dict[Name, dict[bytes, bytes]] = field(default_factory=dict)
    tokens: dict[Name, bytes] = field(default_factory=dict)
    replies: dict[Name, list[Reply]] = field(default_factory=dict)
    tenants: dict[str, TenantSnapshot] = field(default_factory=dict)
    line: set[str] = field(default_factory=set)
    tenants_waiting: list[int] = field(default_factory=list)  # by class, then together

    @classmethod
    def take(cls, yard: PlayedYard, workers: Iterable[str], known: dict[Name, Known]) -> Self:
        """Read the yard."""
        workers, keys = list(workers), yard.keys
        with yard.connection.pipeline(transaction=False) as pipe:
            pipe.zrange(keys.leases, 0, -1)
            pipe.hkeys(keys.workers)
            pipe.hgetall(keys.quarantine)
            pipe.hget(keys.tally, "queued_tokens")
            pipe.hget(keys.tally, TENANTS_QUEUED_TOKENS)
            pipe.zrange(keys.line, 0, -1)
            by_class = [f"{TENANTS_WAITING}:{name}" for name in PRIORITY_CLASSES]
            pipe.hmget(keys.tally, *by_class, TENANTS_WAITING)
            for tenant in set(TENANTS.values()):
                pipe.hgetall(keys.tenant(tenant))
                pipe.hgetall(keys.usage(tenant))
                pipe.zscore(keys.service, tenant)
            for intake in INTAKES:
                pipe.xrange(keys.intake(intake))
            for worker in workers:
                pipe.xrange(keys.lane(worker))
            for name, item in known.items():
                pipe.hgetall(keys.ledger(*name))
                pipe.get(keys.tokens(*name))
                stream, _ = destination(keys, item.request)
                pipe.xrange(keys.reply(*name) if item.is_cancelled_early else stream)
            answers = iter(pipe.execute())
        leases, roster = set(next(answers)), set(next(answers))
        seen = cls(leases, roster, next(answers), int(next(answers) or 0), int(next(answers) or 0))
        seen.line = {tenant.decode() for tenant in next(answers)}
        seen.tenants_waiting = [int(count or 0) for count in next(answers)]
        for tenant in set(TENANTS.values()):
            counts, usage, service = next(answers), next(answers), next(answers)
            seen.tenants[tenant] = TenantSnapshot(
                {name.decode(): int(count) for name, count in counts.items() if count.isdigit()},
                sum(int(count) for name, count in usage.items() if name.endswith(b" out")),
                service or 0.0,
            )
        for intake in INTAKES:
            for entry, fields in next(answers):
                seen.waiting[intake.encode(), entry] = OnLane(entry, fields)
        for worker in workers:
            lane = [OnLane(*entry) for entry in next(answers)]
            seen.lanes[worker] = [item for item in lane if b"attempt" in item.fields]
        for name in known:
            seen.ledgers[name] = next(answers)
            seen.tokens[name] = next(answers) or b""
            replies = [reply for _, fields in next(answers) for reply in decode_replies(fields)]
            seen.replies[name] = [reply for reply in replies if reply.id == name[1]]
        return seen


def ask_for(name: Name) -> Request:
    """The request of a name, always the same."""
    client, request_id = name
    return make_request(
        request_id,
        client=client,
        reply_to=CLIENTS[client],
        stream=True,
        tokens=range(9),
        tenant=TENANTS.get(request_id, ""),
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


def check_places(seen: Snapshot, everything: Mapping[Name, Known], *, is_inexact: bool) -> None:
    """Every request is in exactly one place: an intake, a lane, or answered."""
    on_lanes = Counter(item.name for lane in seen.lanes.values() for item in lane)
    waiting_names = {item.name for item in seen.waiting.values()}
    queued = queued_of_tenants = 0
    for name, known in everything.items():
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
                    _check_retry(item, known)
                else:
                    size = max(1, len(prompt_value(known.request)) // 4)
                    queued += size
                    queued_of_tenants += size if ":" in intake else 0
    # The leader's scan corrects the count.
    assert is_inexact or seen.queued_tokens == queued
    # That of tenants is too high after a deletion, until none waits.
    assert seen.tenants_queued_tokens >= queued_of_tenants


def _check_retry(item: OnLane, known: Known) -> None:
    """A retry has its history and its published tokens."""
    history = {name: int(item.fields.get(name.encode(), b"0")) for name in HISTORY}
    assert history == known.history
    assert unpack_tokens(item.fields.get(b"published", b"")) == known.published


def check_lanes(
    seen: Snapshot,
    everything: Mapping[Name, Known],
    workers: Mapping[str, Life],
    lane_limit: int,
    *,
    is_inexact: bool,
) -> None:
    """A lane is bounded, belongs to one worker, and has the facts for the next attempt."""
    for worker, lane in seen.lanes.items():
        assert len(lane) <= lane_limit
        alone = seen.quarantine.get(worker.encode())
        if alone and workers[worker].holds and not is_inexact:
            assert [item.entry for item in lane] == [alone]
        is_known = worker.encode() in seen.leases
        assert is_known == (worker.encode() in seen.roster)
        assert is_known or (not workers[worker].holds and not lane)
        for item in lane:
            known, ledger = everything[item.name], seen.ledgers[item.name]
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


def check_tenants(seen: Snapshot, everything: Mapping[Name, Known], *, is_inexact: bool) -> None:
    """Counts of tenants are exact, and those in line are those with something waiting."""
    intakes = [split_intake(intake.decode()) for intake, _ in seen.waiting]
    waiting = Counter(tenant for _, tenant in intakes)
    if not is_inexact:
        classes = Counter(name for name, tenant in intakes if tenant)
        by_class = [classes[name] for name in PRIORITY_CLASSES]
        assert seen.tenants_waiting == [*by_class, sum(by_class)]
    for tenant, found in seen.tenants.items():
        own = {name: known for name, known in everything.items() if known.request.tenant == tenant}
        assert found.output == sum(known.paid for known in own.values())
        running = sum(seen.ledgers[name].get(b"state") == b"assigned" for name in own)
        assert found.counts.get("running", 0) == running
        assert found.service >= 0
        if not is_inexact:
            assert found.counts.get("waiting", 0) == waiting[tenant]
            for name in PRIORITY_CLASSES:
                own_class = found.counts.get(f"waiting:{name}", 0)
                assert own_class == intakes.count((name, tenant))
            assert (tenant in seen.line) is (waiting[tenant] > 0)


def check_replies(seen: Snapshot, name: Name, known: Known) -> None:
    """Every token is published once, in order, with one result at the end."""
    streamed = list[int]()
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
