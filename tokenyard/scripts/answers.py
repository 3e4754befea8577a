"""The return values of the scripts, and the structs that they take."""

from __future__ import annotations

import enum
from typing import Final, Literal

from msgspec import Struct

from tokenyard.protocol.replies import Reply, encode_reply
from tokenyard.protocol.wire import Assignment

#: Why a worker's lease ends: it left in order, was killed from outside, or crashed.
Why = Literal["left", "lost", "crashed"]
#: A charge has no longer names of models.
_LONGEST_MODEL: Final = 100


class Submitted(enum.IntEnum):
    """The outcome of a submission."""

    FULL = 0
    ACCEPTED = 1
    KNOWN = 2
    LATE = 3
    REUSED = 4
    QUOTA = 5


class Dispatched(enum.IntEnum):
    """The outcome of moving an intake entry to a lane."""

    DISPATCHED = 1
    DUPLICATE = 2
    CLOSED = 3
    FULL = 4
    GONE = 5
    REUSED = 6
    HELD = 7


class Answered(enum.IntEnum):
    """The outcome of answering or burying an intake entry."""

    DONE = 1
    DUPLICATE = 2
    GONE = 5
    REUSED = 6


class Published(enum.IntEnum):
    """The outcome of publishing a delta or a result."""

    LEASE_LOST = -1
    STALE = 0
    PUBLISHED = 1
    REPEATED = 2


class Cancelled(enum.IntEnum):
    """The outcome of a cancel."""

    CANCELLED = 1
    OVER = 2
    MOVED = 3
    CANCELLED_BEFORE_ARRIVAL = 4


class HandedBack(enum.IntEnum):
    """The outcome of handing back a request."""

    LEASE_LOST = -1
    STALE = 0
    HANDED_BACK = 1


class Acceptance(Struct, frozen=True, gc=False):
    """Answer to one submission.

    ACCEPTED has the server id, the number of requests before it and their estimated time in ms (-1
    while no rate is known); KNOWN and REUSED have the state, FULL the time to retry after, LATE the
    time that it would wait, QUOTA the limit and the time to retry after (-1: never).
    """

    code: Submitted
    sid: str = ""
    state: str = ""
    retry_after_ms: int = 0
    position: int = 0
    eta_ms: int = -1
    limit: str = ""

    @property
    def retry_after_s(self) -> float | None:
        """Of a refusal; None where the same request is refused each time."""
        return self.retry_after_ms / 1000 if self.retry_after_ms >= 0 else None


class Transferred(enum.IntEnum):
    """The outcome of moving an entry to its tenant's intake."""

    MOVED = 1
    QUOTA = 2
    GONE = 5


class TransferAnswer(Struct, frozen=True, gc=False):
    """The answer to one `Transfer`; QUOTA has the limit and the time to retry after (-1: never)."""

    code: Transferred
    limit: str = ""
    retry_after_ms: int = 0

    @property
    def retry_after_s(self) -> float | None:
        """None where the same request is refused each time."""
        return self.retry_after_ms / 1000 if self.retry_after_ms >= 0 else None


class Charge(Struct, frozen=True, gc=False):
    """What a request counts for its tenant from its dispatch until its tokens are known.

    ``amount`` is an estimate; the rates, of a token in and out, are those by which it is settled.
    All are in weighted tokens by the tenant's weight, from 0 to 1e12.
    """

    tenant: str  # "" is no tenant
    amount: float
    input_rate: float = 1.0
    output_rate: float = 2.0
    model: str = ""  # under which its usage is counted

    def __str__(self) -> str:
        """As `dispatch` and the ledger have it."""
        amounts = f"{self.amount!r} {self.input_rate!r} {self.output_rate!r}"
        return f"{amounts} {self.tenant} {self.model[:_LONGEST_MODEL]}"


class Move(Struct, frozen=True, gc=False):
    """One intake entry to move to one lane."""

    intake: str
    entry: str
    client: str
    request_id: str
    worker: str
    lane_limit: int
    alone: bool = False  # nothing else may be on the lane with it
    why: str = ""  # that lane; for the record
    digest: str = ""  # of the request
    on_trial: bool = False  # in a group with the other moves on trial to that lane in this call
    charge: Charge | None = None  # None where only requests without a tenant wait
    deadline_ms: int = 0  # instead of its own; 0: its own


class Transfer(Struct, frozen=True, gc=False):
    """One entry of a common intake to move to its tenant's."""

    entry: str
    tenant: str
    client: str
    request_id: str
    digest: str = ""


class Publication(Struct):
    """One reply of a worker, with the fencing token of its assignment."""

    assignment: Assignment
    reply: Reply
    epoch: int | None = None  # kept as that of the first published token, unless one is
    is_trusted: bool = False  # a delta whose attempt was compared lately
    _packed: bytes = b""

    def packed(self) -> bytes:
        """The reply as it is sent; packed once, also if the server has to be asked again."""
        if not self._packed:
            self._packed = encode_reply(self.reply)
        return self._packed


class CancelledUse(Struct, frozen=True, gc=False):
    """What the engine had used for a request when it was cancelled."""

    client: str
    request_id: str
    entry: str  # of the lane
    input: int | None = None  # tokens; None: the engine had not begun with it
    cached: int = 0
    output: int = 0  # tokens of all choices


class LostRequest(Struct, frozen=True, gc=False):
    """A request whose entry is not where its ledger has it."""

    client: str
    request_id: str
    state: str  # waiting or assigned
    where: str  # the intake or the worker; "" where the ledger names none
    entry: str
    may_run: bool  # its worker holds its lease, and may have read the entry before its deletion


class LedgerScan(Struct, frozen=True):
    """The findings of a scan of some ledgers."""

    cursor: int  # where to continue; 0 at the end
    ledgers: int
    tokens: int  # of the requests found waiting in their places
    queued_tokens: int  # of all requests, by the yard's counter
    found: list[LostRequest]
    out_of_line: list[str] = []  # tenants with something waiting who do not stand in line
