"""One typed method for each Lua file in ``tokenyard/lua``.

`Scripts` calls them over a synchronous connection; the asynchronous client uses the same `Call`
values. Scripts are called by EVALSHA with the hash of their text, so two versions of Tokenyard
can share one server. Expected refusals are values here; only the public client raises.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Generic, Literal, TypeVar

import redis

from tokenyard.keys import GROUP, IntakeClass, Keys, PriorityClass
from tokenyard.replies import Reply, encode_reply
from tokenyard.wire import Assignment, Refused, ReplyKind, Request, request_fields

Arg = bytes | str | int | float
T = TypeVar("T")
E = TypeVar("E", bound=enum.IntEnum)


class Submitted(enum.IntEnum):
    """What became of a submission."""

    FULL = 0
    ACCEPTED = 1
    KNOWN = 2


class Dispatched(enum.IntEnum):
    """What became of an intake entry that was to move to a lane."""

    NOT_LEADER = -1
    DISPATCHED = 1
    DUPLICATE = 2
    CLOSED = 3
    FULL = 4
    GONE = 5


class Answered(enum.IntEnum):
    """What became of an intake entry that was to be answered or buried."""

    NOT_LEADER = -1
    DONE = 1
    DUPLICATE = 2
    GONE = 5


class Published(enum.IntEnum):
    """What became of a delta or a result that a worker wanted to publish."""

    LEASE_LOST = -1
    STALE = 0
    PUBLISHED = 1
    REPEATED = 2


class Renewed(enum.IntEnum):
    """Whether a worker still holds its lease."""

    LOST = 0
    HELD = 1


#: Answers of `Scripts.rescue` beside the number of entries left.
RESCUE_NOT_LEADER: Final = -1
RESCUE_HELD: Final = -2
#: Answer of `Scripts.retire` for a worker that the yard does not know.
RETIRE_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Answer to one submission: the server id, the state it is known in, or when to retry."""

    code: Submitted
    sid: str = ""
    state: str = ""
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """One intake entry that should go onto one lane."""

    intake: IntakeClass
    entry: str
    client: str
    request_id: str
    worker: str
    lane_limit: int


@dataclass(frozen=True, slots=True)
class Publication:
    """One reply of a worker, with the fencing token of its assignment."""

    assignment: Assignment
    reply: Reply


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One script call and how to read its answer; doing it is left to a connection."""

    script: str
    keys: Sequence[str]
    args: Sequence[Arg]
    read: Callable[[Any], T]


_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)


@functools.cache
def source(name: str) -> str:
    """Text of one script, its includes spliced in."""
    folder = resources.files("tokenyard") / "lua"
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(
        lambda found: (folder / "include" / f"{found[1]}.lua").read_text(encoding="utf-8"), text
    )


def submit(
    keys: Keys, priority_class: PriorityClass, requests: Sequence[Request]
) -> Call[list[Acceptance]]:
    """Accept a burst of requests of one priority class, each at most once."""
    args: list[Arg] = [priority_class]
    for request in requests:
        fields = request_fields(request)
        args.append(2 * len(fields))
        for item in fields.items():
            args.extend(item)
    ledgers = [keys.ledger(request.client, request.id) for request in requests]
    intakes = [keys.intake(name) for name in ("high", "normal", "low", "retry")]
    return Call("submit", [keys.info, *intakes, *ledgers], args, _acceptances)


def _acceptances(answers: list[list[Any]]) -> list[Acceptance]:
    return [_acceptance(Submitted(code), value) for code, value in answers]


def _acceptance(code: Submitted, value: Any) -> Acceptance:
    match code:
        case Submitted.ACCEPTED:
            return Acceptance(code, sid=value.decode())
        case Submitted.KNOWN:
            return Acceptance(code, state=value.decode())
        case Submitted.FULL:
            return Acceptance(code, retry_after_ms=value)


class Scripts:
    """The scripts of one yard over one synchronous connection pool."""

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        *,
        reply_maxlen: int = 10_000,
        dead_maxlen: int = 10_000,
    ) -> None:
        self.keys = keys
        self._connection = connection
        self._reply_maxlen = reply_maxlen
        self._dead_maxlen = dead_maxlen
        self._script = functools.cache(lambda name: connection.register_script(source(name)))

    def call(self, call: Call[T]) -> T:
        """Make one call and read its answer."""
        return call.read(self._script(call.script)(keys=call.keys, args=call.args))

    def _run(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        return self._script(script)(keys=keys, args=args)

    # Clients

    def submit(
        self, priority_class: PriorityClass, requests: Sequence[Request]
    ) -> list[Acceptance]:
        """Accept a burst of requests of one priority class, each at most once."""
        return self.call(submit(self.keys, priority_class, requests))

    # The leader

    def lead(self, name: str, lease_ms: int, token: str = "") -> str:
        """Take or keep the lead; the leader token, or "" while another leads."""
        keys = [self.keys.leader, self.keys.info]
        answer: bytes = self._run("lead", keys, [name, lease_ms, token])
        return answer.decode()

    def resign(self, token: str) -> bool:
        """Give up the lead; False if it was another's."""
        return bool(self._run("resign", [self.keys.leader, self.keys.events], [token]))

    def dispatch(self, token: str, moves: Sequence[Move]) -> list[Dispatched]:
        """Move entries onto lanes; one code for each, all NOT_LEADER for a deposed leader."""
        keys = [self.keys.leader, self.keys.leases]
        args: list[Arg] = [token, GROUP]
        for move in moves:
            keys += [
                self.keys.intake(move.intake),
                self.keys.lane(move.worker),
                self.keys.ledger(move.client, move.request_id),
            ]
            args += [move.intake, move.entry, move.worker, move.lane_limit]
        return _codes(Dispatched, self._run("dispatch", keys, args), len(moves))

    def answer(
        self, token: str, intake: IntakeClass, entry: str, request: Request | Refused, reply: Reply
    ) -> Answered:
        """Give a waiting request its result without running it."""
        client, request_id = request.client, request.id
        keys = [
            self.keys.leader,
            self.keys.intake(intake),
            self.keys.ledger(client, request_id),
            self.keys.tokens(client, request_id),
            destination(self.keys, request),
        ]
        args: list[Arg] = [token, GROUP, intake, entry, request.kind, reply.status or "failed"]
        args += [request.result_ttl_s, self._reply_maxlen, encode_reply(reply)]
        return Answered(self._run("answer", keys, args))

    def bury(self, token: str, intake: IntakeClass, entry: str, reason: str) -> Answered:
        """Put an entry that nobody can be answered for into the dead letters."""
        keys = [self.keys.leader, self.keys.intake(intake), self.keys.dead]
        args: list[Arg] = [token, GROUP, intake, entry, reason, self._dead_maxlen]
        return Answered(self._run("bury", keys, args))

    def rescue(self, token: str, worker: str, entries: Sequence[tuple[str, str, str]] = ()) -> int:
        """Take back lane entries, given as (entry, client, request id), of a lost worker.

        Returns how many are left on its lane, `RESCUE_HELD` or `RESCUE_NOT_LEADER`. Call it
        first without entries, which ends the lease.
        """
        keys = [self.keys.leader, self.keys.leases, self.keys.workers]
        keys += [self.keys.lane(worker), self.keys.intake("retry")]
        for _, client, request_id in entries:
            keys += [self.keys.ledger(client, request_id), self.keys.tokens(client, request_id)]
        left: int = self._run("rescue", keys, [token, worker, *(entry for entry, _, _ in entries)])
        return left

    # Workers and controllers

    def register(self, name: str, lease_ms: int, info: bytes) -> str:
        """Join under ``name``; the worker's full name, with its incarnation."""
        keys = [self.keys.info, self.keys.workers, self.keys.leases, self.keys.events]
        answer: bytes = self._run("register", keys, [name, lease_ms, info])
        return answer.decode()

    def renew(self, lease_ms: int, workers: Sequence[tuple[str, bytes]]) -> list[Renewed]:
        """Extend leases and refresh roster entries, given as (worker, JSON)."""
        args: list[Arg] = [lease_ms]
        for worker, info in workers:
            args += [worker, info]
        answers = self._run("renew", [self.keys.leases, self.keys.workers], args)
        return _codes(Renewed, answers, len(workers))

    def retire(self, worker: str, why: Literal["left", "lost"]) -> int:
        """End a worker's lease now; how many of its entries wait for the rescuer."""
        keys = [self.keys.leases, self.keys.workers, self.keys.lane(worker), self.keys.events]
        left: int = self._run("retire", keys, [worker, why])
        return left

    def emit(self, worker: str, deltas: Sequence[Publication]) -> list[Published]:
        """Publish the deltas of one engine step; one code for each, in their order."""
        keys = [self.keys.leases]
        args: list[Arg] = [worker, self._reply_maxlen]
        order = _by_destination(self.keys, deltas)
        for (stream, kind), group in order:
            keys.append(stream)
            args += [kind, len(group)]
            for _, item in group:
                keys += self._ledger_and_tokens(item)
                args += [item.assignment.attempt, item.reply.seq]
                args += [item.reply.tokens, encode_reply(item.reply)]
        return self._published("emit", keys, args, order, len(deltas))

    def finish(self, worker: str, results: Sequence[Publication]) -> list[Published]:
        """Publish results and free their places; one code for each, in their order."""
        keys = [self.keys.leases, self.keys.lane(worker), self.keys.events]
        args: list[Arg] = [worker, self._reply_maxlen]
        order = _by_destination(self.keys, results)
        for (stream, kind), group in order:
            keys.append(stream)
            args += [kind, len(group)]
            for _, item in group:
                keys += self._ledger_and_tokens(item)
                args += [item.assignment.entry, item.assignment.attempt]
                args += [item.reply.status or "failed", item.assignment.request.result_ttl_s]
                args.append(encode_reply(item.reply))
        return self._published("finish", keys, args, order, len(results))

    def _ledger_and_tokens(self, item: Publication) -> list[str]:
        request = item.assignment.request
        client, request_id = request.client, request.id
        return [self.keys.ledger(client, request_id), self.keys.tokens(client, request_id)]

    def _published(
        self, script: str, keys: Sequence[str], args: Sequence[Arg], order: _Groups, count: int
    ) -> list[Published]:
        answers = _codes(Published, self._run(script, keys, args), count)
        if answers and answers[0] is Published.LEASE_LOST:
            return answers
        codes = dict(zip((at for _, group in order for at, _ in group), answers, strict=True))
        return [codes[at] for at in range(count)]


_Groups = list[tuple[tuple[str, ReplyKind], list[tuple[int, Publication]]]]


def destination(keys: Keys, request: Request | Refused) -> str:
    """The stream that a request's replies go to."""
    if request.kind == "frame":
        return keys.replies(request.client)
    return keys.reply(request.client, request.id)


def _by_destination(keys: Keys, items: Iterable[Publication]) -> _Groups:
    """Publications by reply stream, each with its place in ``items``."""
    groups: dict[tuple[str, ReplyKind], list[tuple[int, Publication]]] = {}
    for at, item in enumerate(items):
        request = item.assignment.request
        groups.setdefault((destination(keys, request), request.kind), []).append((at, item))
    return list(groups.items())


def _codes(kind: type[E], answers: int | list[int], count: int) -> list[E]:
    """One code for each item; a single answer stands for all."""
    if isinstance(answers, int):
        return [kind(answers)] * count
    return [kind(answer) for answer in answers]
