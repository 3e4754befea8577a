"""The model of a yard that the random walks maintain, and a snapshot of the real one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from tests.support.yard import Yard
from tokenyard.protocol.keys import INTAKE_CLASSES
from tokenyard.protocol.parse import unfold
from tokenyard.protocol.replies import Reply, decode_replies
from tokenyard.protocol.wire import Assignment, Request
from tokenyard.scripts import Why, destination

Name = tuple[str, str]  # of a request: client and id
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
    is_astray: bool = False  # its entry was deleted by hand
    is_cancelled_early: bool = False  # cancelled before its arrival

    def suffer(self, why: Why, *, alone: bool) -> None:
        """Note that its worker is lost or has left."""
        self.running = None
        if why == "left":
            return
        self.history["crashes"] += 1
        self.history["suspected"] += why == "crashed"
        if alone:
            self.history[f"{why}_alone"] += 1

    def live_again(self, replies_before: int) -> None:
        """Note that the dead letter waits again."""
        self.published, self.result, self.running = [], None, None
        self.is_astray = False
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
class Snapshot:
    """The whole state of the yard, read in one round trip."""

    leases: set[bytes]
    roster: set[bytes]
    quarantine: dict[bytes, bytes]
    queued_tokens: int
    waiting: dict[tuple[bytes, bytes], OnLane] = field(default_factory=dict)  # intake and entry
    lanes: dict[str, list[OnLane]] = field(default_factory=dict)
    ledgers: dict[Name, dict[bytes, bytes]] = field(default_factory=dict)
    tokens: dict[Name, bytes] = field(default_factory=dict)
    replies: dict[Name, list[Reply]] = field(default_factory=dict)

    @classmethod
    def take(cls, yard: Yard, workers: Iterable[str], known: dict[Name, Known]) -> Self:
        """Read the yard."""
        workers, keys = list(workers), yard.keys
        with yard.connection.pipeline(transaction=False) as pipe:
            pipe.zrange(keys.leases, 0, -1)
            pipe.hkeys(keys.workers)
            pipe.hgetall(keys.quarantine)
            pipe.hget(keys.tally, "queued_tokens")
            for intake in INTAKE_CLASSES:
                pipe.xrange(keys.intake(intake))
            for worker in workers:
                pipe.xrange(keys.lane(worker))
            for name, item in known.items():
                pipe.hgetall(keys.ledger(*name))
                pipe.get(keys.tokens(*name))
                stream = destination(keys, item.request)
                pipe.xrange(keys.reply(*name) if item.is_cancelled_early else stream)
            answers = iter(pipe.execute())
        leases, roster = set(next(answers)), set(next(answers))
        seen = cls(leases, roster, next(answers), int(next(answers) or 0))
        for intake in INTAKE_CLASSES:
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
