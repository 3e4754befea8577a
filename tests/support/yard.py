"""A yard under test: its scripts, and short ways to change and read its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import redis

from tests.support.builders import make_delta, make_request, make_result, random_name, worker_json
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Keys, PriorityClass, Yard
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.replies import Reply, decode_replies, decode_reply, refusal
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.wire import Assignment, Request
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Answered, Dispatched, Move, Publication, Published, Submitted
from tokenyard.scripts.calls import destination
from tokenyard.scripts.client import waits_at

LONG_MS = 600_000
LONGEST_TEST_S = 600


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in an intake."""

    request: Request
    intake: str
    entry: str

    def to(
        self,
        worker: str,
        lane_limit: int = 1000,
        *,
        alone: bool = False,
        on_trial: bool = False,
    ) -> Move:
        """Its move onto a worker's lane."""
        client, request_id, why = self.request.client, self.request.id, "the test says so"
        move = Move(self.intake, self.entry, client, request_id, worker, lane_limit, alone, why)
        digest = request_digest(self.request)
        return msgspec.structs.replace(move, digest=digest, on_trial=on_trial)


class PlayedYard(Yard):
    """One leader, and the workers that the test registers."""

    def __init__(self, connection: redis.Redis, keys: Keys, scripts: Scripts) -> None:
        super().__init__(connection, keys)
        self.scripts = scripts
        self.token = scripts.lead("coordinator", LONG_MS)

    @property
    def now_ms(self) -> int:
        """The server's time."""
        told: Any = self.connection.time()
        return unix_ms(told)

    # Changing the state

    def depose(self) -> str:
        """Let another coordinator take over; its token. `token` stays the old one."""
        self.scripts.resign(self.token)
        return self.scripts.lead("successor", LONG_MS)

    def worker(self, name: str = "w", lease_ms: int = LONG_MS, **info: Any) -> str:
        """Register a worker with a lease, whose entry in the roster says this."""
        return self.scripts.register(name, lease_ms, worker_json(name, **info))

    def fence(self, worker: str, how: str) -> str:
        """End a worker's lease, its lane unchanged; the name under which it writes from then on."""
        if how == "rescued":
            self.expire(worker)
            self.scripts.rescue(self.token, worker)
        elif how in ("left", "lost"):
            self.scripts.retire(worker, how)
        return "nobody.1" if how == "unknown" else worker

    def expire(self, worker: str) -> None:
        """Let a worker's lease expire."""
        self.connection.zadd(self.keys.leases, {worker: 1}, xx=True)

    def submit(
        self, request: Request | None = None, priority_class: PriorityClass = "normal"
    ) -> QueuedRequest:
        """Submit a request by the script."""
        request = request or make_request()
        (accepted,) = self.scripts.submit(priority_class, [request])
        assert accepted.code is Submitted.ACCEPTED
        intake, _, entry = accepted.sid.partition("/")
        return QueuedRequest(request, intake, entry)

    def push(
        self,
        fields: Mapping[bytes | str, bytes | str],
        request: Request | None = None,
        intake: str = "normal",
        entry: str = "*",
    ) -> QueuedRequest:
        """Submit a request by a plain XADD."""
        added = self.connection.xadd(self.keys.intake(intake), dict(fields), id=entry)
        return QueuedRequest(request or make_request(), intake, added.decode())

    def place(self, waiting: QueuedRequest, worker: str, *, alone: bool = False) -> Assignment:
        """Move a waiting request onto a lane; the assignment that the worker reads."""
        (code,) = self.scripts.dispatch(self.token, [waiting.to(worker, alone=alone)])
        assert code is Dispatched.DISPATCHED
        return self.lane(worker)[-1]

    def assign(
        self, worker: str, request: Request | None = None, *, alone: bool = False
    ) -> Assignment:
        """Submit a request and move it onto a worker's lane; the assignment."""
        return self.place(self.submit(request), worker, alone=alone)

    def emit(
        self, worker: str, held: Assignment, tokens: Sequence[int], seq: int = 0, **epoch: int
    ) -> Published:
        """Publish a delta of ``tokens`` behind ``seq`` others."""
        delta = Publication(held, make_delta(held.request.id, seq, tokens), **epoch)
        (code,) = self.scripts.emit(worker, [delta])
        return code

    def finish(
        self, worker: str, held: Assignment, tokens: Sequence[int] = (), **fields: Any
    ) -> Published:
        """Publish a result."""
        result = Publication(held, make_result(held.request.id, tokens, **fields))
        (code,) = self.scripts.finish(worker, [result])
        return code

    def answer(
        self,
        waiting: QueuedRequest,
        code: Code = Code.INVALID_REQUEST,
        *,
        published: bytes = b"",
        **how: str,
    ) -> Answered:
        """Answer a waiting request by a refusal."""
        reply = refusal(waiting.request, code, "the test says so", published=published)
        place = (waiting.intake, waiting.entry, waiting.request)
        return self.scripts.answer(self.token, *place, reply, **how)

    def rescue(self, worker: str, trials: Sequence[int | None] | None = None) -> int:
        """Rescue a worker's whole lane in one call."""
        held = [(item.entry, item.request.client, item.request.id) for item in self.lane(worker)]
        return self.scripts.rescue(self.token, worker, held, trials)

    def lose(self, worker: str) -> int:
        """Let a worker's lease expire, and rescue its whole lane."""
        self.expire(worker)
        return self.rescue(worker)

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """Keep the server at its memory limit, without eviction, until the block ends."""
        before = self.connection.config_get("maxmemory")["maxmemory"]
        self.connection.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.connection.config_set("maxmemory", before)

    # Reading the state

    def intake(self, name: str = "normal") -> list[tuple[str, dict[bytes, bytes]]]:
        """The entries of an intake."""
        entries = self.connection.xrange(self.keys.intake(name))
        return [(entry.decode(), fields) for entry, fields in entries]

    def waiting(self, request: Request, name: str = "retry") -> QueuedRequest:
        """The place where a request waits, from its ledger."""
        ledger = self.ledger(request)
        at = (ledger["sid"], ledger.get("intake", ""), ledger.get("entry", ""))
        intake, entry = waits_at(*at)
        assert intake == name
        assert entry in [found for found, _ in self.intake(name)]
        return QueuedRequest(request, name, entry)

    def lane(self, worker: str) -> list[Assignment]:
        """The assignments on a lane, as its worker reads them."""
        found = []
        for entry, fields in self.connection.xrange(self.keys.lane(worker)):
            if b"attempt" not in fields:
                continue  # see `told_to_cancel`
            assignment = parse_assignment(entry.decode(), fields)
            assert isinstance(assignment, Assignment)
            found.append(assignment)
        return found

    def told_to_cancel(self, worker: str) -> list[str]:
        """The lane entries that a worker's cancel entries name."""
        entries = self.connection.xrange(self.keys.lane(worker))
        return [fields[b"cancel"].decode() for _, fields in entries if b"attempt" not in fields]

    def alone(self, worker: str) -> str | None:
        """The entry that has a worker's lane to itself, or None."""
        entry = self.connection.hget(self.keys.quarantine, worker)
        return None if entry is None else entry.decode()

    def queued_tokens(self) -> int:
        """The yard's count of queued tokens."""
        return int(self.connection.hget(self.keys.tally, "queued_tokens") or 0)

    def ledger(self, request: Request) -> dict[str, str]:
        """The ledger of a request without its result."""
        fields = self.connection.hgetall(self.keys.ledger(request.client, request.id))
        fields.pop(b"result", None)
        return {name.decode(): value.decode() for name, value in fields.items()}

    def result(self, request: Request) -> Reply | None:
        """The result in the ledger."""
        packed = self.connection.hget(self.keys.ledger(request.client, request.id), "result")
        return None if packed is None else decode_reply(packed)

    def replies(self, request: Request) -> list[Reply]:
        """All entries of a request's reply stream."""
        entries = self.connection.xrange(destination(self.keys, request)[0])
        return [reply for _, fields in entries for reply in decode_replies(fields)]

    def published(self, request: Request) -> bytes:
        """The published tokens of a running request, packed."""
        value = self.connection.get(self.keys.tokens(request.client, request.id))
        return value or b""

    def events(self) -> list[dict[bytes, bytes]]:
        """The wake-ups for the coordinator."""
        return [fields for _, fields in self.connection.xrange(self.keys.events)]

    def freed(self) -> list[dict[bytes, bytes]]:
        """The freed places that the coordinator is told of."""
        return [fields for _, fields in self.connection.xrange(self.keys.capacity)]

    def ttl_s(self, key: str) -> int:
        """The TTL of a key in seconds; -1 without one."""
        return int(self.connection.ttl(key))

    def lives_for(self, key: str, given_s: int) -> bool:
        """Whether a key was given so many seconds, of which no test uses up more than a few."""
        return given_s - LONGEST_TEST_S <= self.ttl_s(key) <= given_s


def requests(count: int, **fields: object) -> Sequence[Request]:
    """So many different requests."""
    return [make_request(random_name("request"), **fields) for _ in range(count)]
