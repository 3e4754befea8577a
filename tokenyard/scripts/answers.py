"""What the scripts answer, and the values that are handed to them."""

from __future__ import annotations

import enum
from typing import Final, Literal

from msgspec import Struct

from tokenyard.protocol.keys import IntakeClass
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment

#: Why a worker's lease ends: it left of its own will, was killed from outside, or died by itself.
Why = Literal["left", "lost", "crashed"]


class Submitted(enum.IntEnum):
    """What became of a submission."""

    FULL = 0
    ACCEPTED = 1
    KNOWN = 2
    LATE = 3
    REUSED = 4


class Dispatched(enum.IntEnum):
    """What became of an intake entry that was to move to a lane."""

    NOT_LEADER = -1
    DISPATCHED = 1
    DUPLICATE = 2
    CLOSED = 3
    FULL = 4
    GONE = 5
    REUSED = 6


class Answered(enum.IntEnum):
    """What became of an intake entry that was to be answered or buried."""

    NOT_LEADER = -1
    DONE = 1
    DUPLICATE = 2
    GONE = 5
    REUSED = 6


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


class Cancelled(enum.IntEnum):
    """What became of a request that was to be cancelled."""

    CANCELLED = 1
    OVER = 2
    MOVED = 3
    CANCELLED_BEFORE_ARRIVAL = 4


class CancelRequested(enum.IntEnum):
    """What became of a wish that a request be cancelled."""

    FULL = 0
    REQUESTED = 1


class Reconciled(enum.IntEnum):
    """What became of a request whose entry was missed."""

    NOT_LEADER = -1
    STAYS = 0
    ENDED = 1


class HandedBack(enum.IntEnum):
    """What became of a request that a worker wanted to give back."""

    LEASE_LOST = -1
    STALE = 0
    HANDED_BACK = 1


class Acceptance(Struct, frozen=True, gc=False):
    """Answer to one submission.

    ACCEPTED has the server id, how many requests are served before it and their time in ms (-1
    while no rate is known); KNOWN and REUSED the state; FULL when to retry; LATE the time it
    would wait.
    """

    code: Submitted
    sid: str = ""
    state: str = ""
    retry_after_ms: int = 0
    position: int = 0
    eta_ms: int = -1


class Move(Struct, frozen=True, gc=False):
    """One intake entry that should go onto one lane."""

    intake: IntakeClass
    entry: str
    client: str
    request_id: str
    worker: str
    lane_limit: int
    alone: bool = False  # nothing else may be on the lane with it
    why: str = ""  # there; for the record
    digest: str = ""  # of the request
    on_trial: bool = False  # with all moves of this call to that lane that are, too: a group


class Publication(Struct, frozen=True):
    """One reply of a worker, with the fencing token of its assignment."""

    assignment: Assignment
    reply: Reply
    epoch: int | None = None  # to be kept as that of the first published token, if none is


class LostRequest(Struct, frozen=True, gc=False):
    """A request whose entry is not where its ledger says."""

    client: str
    request_id: str
    state: str  # waiting or assigned
    where: str  # the class or the worker; "" where the ledger names none
    entry: str
    may_run: bool  # its worker holds its lease, and may have read the entry before it was deleted


class LedgerScan(Struct, frozen=True):
    """What a look through a part of the ledgers has shown."""

    cursor: int  # where to go on; 0 at the end
    ledgers: int
    tokens: int  # of those that wait where they should
    queued_tokens: int  # of all, by the yard's count
    found: list[LostRequest]
