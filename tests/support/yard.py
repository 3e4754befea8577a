"""A yard under test: its scripts, and short ways to bring requests into a state and look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import redis

from tests.support.builders import make_request, random_name, worker_json
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.keys import (
    CONSUMER,
    GROUP,
    INTAKE_CLASSES,
    IntakeClass,
    Keys,
    PriorityClass,
)
from tokenyard.protocol.parse import parse_assignment
from tokenyard.protocol.replies import Reply, decode_replies, decode_reply
from tokenyard.protocol.wire import Assignment, Request
from tokenyard.scripts import Dispatched, Move, Scripts, Submitted, destination, waits_at

LONG_MS = 600_000


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in an intake."""

    request: Request
    intake: IntakeClass
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


class Yard:
    """One leader, its consumer groups, and as many workers as the test registers."""

    def __init__(self, connection: redis.Redis, keys: Keys, scripts: Scripts) -> None:
        self.connection = connection
        self.keys = keys
        self.scripts = scripts
        for name in INTAKE_CLASSES:
            connection.xgroup_create(keys.intake(name), GROUP, id="0", mkstream=True)
        self.token = scripts.lead("coordinator", LONG_MS)

    # Bringing about

    def depose(self) -> str:
        """Another coordinator takes over; its token. `token` stays the old one."""
        self.scripts.resign(self.token)
        return self.scripts.lead("successor", LONG_MS)

    def worker(self, name: str = "w", lease_ms: int = LONG_MS) -> str:
        """A new worker with a lease."""
        return self.scripts.register(name, lease_ms, worker_json(name))

    def expire(self, worker: str) -> None:
        """The worker's lease runs out, as it does when nobody renews it."""
        self.connection.zadd(self.keys.leases, {worker: 1}, xx=True)

    def submit(
        self, request: Request | None = None, priority_class: PriorityClass = "normal"
    ) -> QueuedRequest:
        """A request in the intake, by way of the script."""
        request = request or make_request()
        (accepted,) = self.scripts.submit(priority_class, [request])
        assert accepted.code is Submitted.ACCEPTED
        return QueuedRequest(request, priority_class, accepted.sid.partition("/")[2])

    def push(
        self,
        fields: Mapping[bytes | str, bytes | str],
        request: Request | None = None,
        intake: IntakeClass = "normal",
        entry: str = "*",
    ) -> QueuedRequest:
        """A request in the intake by a plain XADD, as any client may do it."""
        added = self.connection.xadd(self.keys.intake(intake), dict(fields), id=entry)
        return QueuedRequest(request or make_request(), intake, added.decode())

    def read(self, intake: IntakeClass = "normal") -> list[str]:
        """Read the intake through its group, as the coordinator does."""
        stream = self.keys.intake(intake)
        answer = self.connection.xreadgroup(GROUP, CONSUMER, {stream: ">"}, count=1000)
        return [entry.decode() for _, entries in answer for entry, _ in entries]

    def place(self, waiting: QueuedRequest, worker: str, *, alone: bool = False) -> Assignment:
        """Move a waiting request onto a lane; what the worker reads there."""
        (code,) = self.scripts.dispatch(self.token, [waiting.to(worker, alone=alone)])
        assert code is Dispatched.DISPATCHED
        return self.lane(worker)[-1]

    def assign(
        self, worker: str, request: Request | None = None, *, alone: bool = False
    ) -> Assignment:
        """A request on a worker's lane."""
        return self.place(self.submit(request), worker, alone=alone)

    def rescue(self, worker: str, trials: Sequence[int | None] | None = None) -> int:
        """Rescue all that a worker's lane holds, in one call."""
        held = [(item.entry, item.request.client, item.request.id) for item in self.lane(worker)]
        return self.scripts.rescue(self.token, worker, held, trials)

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """The server has reached its bound of memory and deletes nothing by itself."""
        before = self.connection.config_get("maxmemory")["maxmemory"]
        self.connection.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.connection.config_set("maxmemory", before)

    # Looking

    def intake(self, name: IntakeClass = "normal") -> list[tuple[str, dict[bytes, bytes]]]:
        """The entries of an intake."""
        entries = self.connection.xrange(self.keys.intake(name))
        return [(entry.decode(), fields) for entry, fields in entries]

    def waiting(self, request: Request, name: IntakeClass = "retry") -> QueuedRequest:
        """Where a request waits, by its ledger."""
        ledger = self.ledger(request)
        at = (ledger["sid"], ledger.get("intake", ""), ledger.get("entry", ""))
        intake, entry = waits_at(*at)
        assert intake == name
        assert entry in [found for found, _ in self.intake(name)]
        return QueuedRequest(request, name, entry)

    def pending(self, name: IntakeClass = "normal") -> int:
        """How many entries were read through the group and not acknowledged."""
        return int(self.connection.xpending(self.keys.intake(name), GROUP)["pending"])

    def lane(self, worker: str) -> list[Assignment]:
        """What is on a lane, as its worker reads it."""
        found = []
        for entry, fields in self.connection.xrange(self.keys.lane(worker)):
            if b"attempt" not in fields:
                continue  # see `told_to_cancel`
            assignment = parse_assignment(entry.decode(), fields)
            assert isinstance(assignment, Assignment)
            found.append(assignment)
        return found

    def told_to_cancel(self, worker: str) -> list[str]:
        """The lane entries that a worker is told to stop, by entries of the same lane."""
        entries = self.connection.xrange(self.keys.lane(worker))
        return [fields[b"cancel"].decode() for _, fields in entries if b"attempt" not in fields]

    def alone(self, worker: str) -> str | None:
        """The entry that runs alone on a worker's lane, if one does."""
        entry = self.connection.hget(self.keys.quarantine, worker)
        return None if entry is None else entry.decode()

    def queued_tokens(self) -> int:
        """The yard's count of tokens that wait."""
        return int(self.connection.hget(self.keys.tally, "queued_tokens") or 0)

    def ledger(self, request: Request) -> dict[str, str]:
        """The ledger of a request, but for the result."""
        fields = self.connection.hgetall(self.keys.ledger(request.client, request.id))
        fields.pop(b"result", None)
        return {name.decode(): value.decode() for name, value in fields.items()}

    def result(self, request: Request) -> Reply | None:
        """The result in the ledger."""
        packed = self.connection.hget(self.keys.ledger(request.client, request.id), "result")
        return None if packed is None else decode_reply(packed)

    def replies(self, request: Request) -> list[Reply]:
        """Everything that was published on a request's stream."""
        entries = self.connection.xrange(destination(self.keys, request))
        return [reply for _, fields in entries for reply in decode_replies(fields)]

    def published(self, request: Request) -> bytes:
        """The tokens of a running request that its readers have seen, packed."""
        value = self.connection.get(self.keys.tokens(request.client, request.id))
        return value or b""

    def events(self) -> list[dict[bytes, bytes]]:
        """The wake-ups for the coordinator."""
        return [fields for _, fields in self.connection.xrange(self.keys.events)]

    def freed(self) -> list[dict[bytes, bytes]]:
        """The places that became free, as the coordinator hears of them."""
        return [fields for _, fields in self.connection.xrange(self.keys.capacity)]

    def ttl_s(self, key: str) -> int:
        """Seconds that a key has to live; -1 where it stays."""
        return int(self.connection.ttl(key))


def requests(count: int, **fields: object) -> Sequence[Request]:
    """So many different requests."""
    return [make_request(random_name("request"), **fields) for _ in range(count)]
