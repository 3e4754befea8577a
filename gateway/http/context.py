"""What one HTTP request brings to the calls made for it."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.replies import Timing
from tokenyard.protocol.wire import DEFAULT_RESULT_TTL_S

if TYPE_CHECKING:
    from gateway.http.errors import GatewayError
    from gateway.queue.calls import Command


@dataclass(slots=True)
class Ticket:
    """Whether the queue has accepted the request, and why not."""

    decided: asyncio.Event = field(default_factory=asyncio.Event)
    error: GatewayError | None = None
    is_accepted: bool = False

    def accept(self) -> None:
        """The queue has acknowledged the request."""
        self.is_accepted = True
        self.decided.set()

    def fail(self, error: GatewayError) -> None:
        """The request cannot be answered; the first error counts."""
        if self.error is None:
            self.error = error
        self.decided.set()


@dataclass(slots=True)
class RequestContext:
    """One HTTP request that generates."""

    #: Names the request for ever; the ids of its parts on the queue begin with it.
    durable_id: str
    #: Owner of its requests on the queue.
    client: str
    #: Unix seconds of its first arrival at any gateway.
    created: float
    tenant: str = ""
    priority_class: PriorityClass = "normal"
    #: Whether it may have a negative priority.
    may_go_first: bool = True
    deadline_ms: int | None = None
    #: Least time between events of a stream; None: as its tenant is set.
    stream_interval_ms: int | None = None
    #: Whether it waits even where the queue says that its answer will be too late.
    is_patient: bool = False
    #: Whether its requests go on when the HTTP client disconnects.
    continues: bool = False
    #: Whether the client can name the request again: by its key, or by the id of an event.
    can_come_back: bool = False
    #: Off for parsers that take an event for one line of data.
    has_event_ids: bool = True
    #: Whether its requests are known to be on the queue, and only their replies are read.
    is_replay: bool = False
    #: How long its results can be read.
    keep_s: int = DEFAULT_RESULT_TTL_S
    ticket: Ticket = field(default_factory=Ticket)
    #: Of the last of its requests that has ended.
    timing: Timing | None = None
    #: What the limits of its tenant left when it was submitted.
    rate_limits: list[tuple[bytes, bytes]] = field(default_factory=list)
    #: Whether no other HTTP request has had its name before.
    is_first: bool = False
    #: How many of its requests the queue has, or may have.
    asked: int = 0
    drawn: int = 0
    #: Bytes of media that were fetched for it.
    fetched_bytes: int = 0
    #: Why others could not be, which does not matter where the queue has the request already.
    unfetched: GatewayError | None = None
    #: What is written with its first request on the queue.
    unsaved: list[Command] = field(default_factory=list)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the answer, with what is known when it begins."""
        found = [(b"x-request-id", self.durable_id.encode()), *self.rate_limits]
        timing = self.timing
        if timing is None:
            return found
        parts = {"queue": timing.queue_ms, "engine": timing.engine_ms}
        parts["first_token"] = timing.first_token_ms
        shown = ", ".join(f"{name};dur={ms:g}" for name, ms in parts.items() if ms is not None)
        whole = timing.queue_ms + (timing.engine_ms or 0.0)
        found.append((b"openai-processing-ms", b"%d" % whole))
        found.append((b"server-timing", shown.encode()))
        return found

    def take_unsaved(self) -> list[Command]:
        """What is not written yet, once."""
        unsaved, self.unsaved = self.unsaved, []
        return unsaved

    def draw_id(self) -> str:
        """The next of the ids that vLLM would draw at random: 16 hex digits."""
        self.drawn += 1
        return blake2b(f"{self.durable_id}/{self.drawn}".encode(), digest_size=8).hexdigest()


CURRENT: ContextVar[RequestContext | None] = ContextVar("gateway_request", default=None)


def current() -> RequestContext:
    """The request being served; raises `LookupError` outside of one."""
    context = CURRENT.get()
    if context is None:
        raise LookupError("no HTTP request is being served")
    return context
