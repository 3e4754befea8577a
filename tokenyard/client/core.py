"""What a client does, without I/O; `sync` and `aio` carry its operations out.

Each method that returns `Steps` is a generator of `tokenyard.client.operations`. No two of them may
run at the same instant between two operations (the synchronous client holds a lock there).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, Final

from tokenyard import clock
from tokenyard.broker.outage import Backoff
from tokenyard.client.build import RequestBuilder
from tokenyard.client.handshake import YardInfo, read_yard
from tokenyard.client.ledger import Cancellation, RequestState, read_status, status_commands
from tokenyard.client.operations import Ask, Delay, Steps
from tokenyard.client.pending import PendingRequest
from tokenyard.client.router import ReplyRouter, read_entries
from tokenyard.client.state import ClientLease, ClientState
from tokenyard.client.submission import Submitter
from tokenyard.client.tokenization import LocalText, load_tokenizer
from tokenyard.protocol.errors import (
    BrokerUnavailable,
    NotPermitted,
    SettingsError,
    TokenyardError,
    WaitTimeout,
)
from tokenyard.protocol.keys import NAME_RULE, UNNAMED_PREFIX, Keys, is_name
from tokenyard.protocol.replies import TERMINAL
from tokenyard.scripts import client as scripts
from tokenyard.scripts.answers import Cancelled
from tokenyard.scripts.calls import Call

#: Longest blocking read; also how long a gap in the replies may wait to be filled.
BLOCK_MS: Final = 1_000
#: Longest blocking read of a client without pending requests: the reply to the next one ends it.
#: Shorter than the silence after which a request is looked up, so that this is not delayed.
IDLE_BLOCK_MS: Final = 3_000
_READ_COUNT: Final = 500
#: A client that closes cancels this many requests itself; the coordinator cancels the rest.
_MAX_CANCELS: Final = 100
#: Pauses between two reads of the ledger while the leader is to cancel a request.
_FIRST_POLL_S: Final = 0.002
_MAX_POLL_S: Final = 0.2
#: The leader that was asked may have died, so the cancel is requested again after this time.
_REPEAT_S: Final = 1.0


class ClientCore:
    """The behaviour that both clients share."""

    def __init__(
        self,
        url: str,
        yard: str,
        client_id: str | None,
        tokenizer: object | None,
        connect_timeout_s: float,
        result_timeout_s: float,
    ) -> None:
        if client_id is None:
            client_id = f"{UNNAMED_PREFIX}{secrets.token_hex(8)}"
        names = (("yard", yard), ("client_id", client_id))
        errors = [f"{label} {name!r}: {NAME_RULE}" for label, name in names if not is_name(name)]
        if errors:
            raise SettingsError(errors)
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self.state = ClientState(
            url=url,
            keys=Keys(yard),
            client_id=client_id,
            connect_timeout_s=connect_timeout_s,
            result_timeout_s=result_timeout_s,
            builder=RequestBuilder(client_id, self._tokenizer),
            router=ReplyRouter(clock.monotonic()),
            lease=ClientLease(),
        )
        self.builder = self.state.builder
        self.submitter = Submitter(self.state)
        self._may_cancel = True  # until the server refuses
        self._folder = ""  # of the yard's tokenizer, perhaps on another host

    def handshake(self) -> Steps[YardInfo]:
        """Read what the yard announces.

        Raises `NoCoordinator`, `BrokerNotWritable` or `ProtocolMismatch`.
        """
        state = self.state
        info = yield from read_yard(
            state.keys, state.url, state.connect_timeout_s, self.builder.broker_time
        )
        self.builder.max_request_bytes = info.max_request_bytes
        folders = {worker.tokenizer for worker in info.workers.values()}
        self._folder = folders.pop() if len(folders) == 1 else ""  # of two, neither fits all
        return info

    def script_timeout_s(self, call: Call[Any]) -> float:
        """How long to wait for a missing script to be loaded; `probe` asks about this moment."""
        return 0.0 if call.script == "probe" else self.state.connect_timeout_s

    def close(self) -> None:
        """End all waits; `leave` then cancels the attached requests, others continue."""
        state = self.state
        state.is_closed = True
        attached = [state.router.find(name) for name in state.lease.unfinished()]
        cancelled = WaitTimeout("the client was closed, and the request is cancelled with it")
        state.router.forget([one for one in attached if one is not None], cancelled)
        state.router.forget_all(WaitTimeout("the client was closed; the request continues"))

    # Requests

    def attach(self, request_id: str) -> Steps[PendingRequest]:
        """Follow a request that was submitted earlier; raises `UnknownRequest`."""
        router = self.state.router
        pending = router.find(request_id)
        if pending is None:
            local_text = LocalText(self._tokenizer) if self._tokenizer is not None else None
            pending = router.open(request_id, local_text, clock.monotonic())
            pending.is_submitted = True
            pending.folder = self._folder
            try:
                yield from self.state.catch_up([pending])
            except TokenyardError as error:
                router.forget([pending], error)
                raise
            if pending.error is not None:
                raise pending.error
        return pending

    def status(self, request_id: str) -> Steps[RequestState]:
        """Read the state of a request; raises `UnknownRequest`."""
        answers = yield Ask(status_commands(self.state.keys, self.state.client_id, request_id))
        return read_status(request_id, answers)

    def forget(self, requests: Iterable[PendingRequest]) -> None:
        """Stop following these requests."""
        self.state.router.forget(
            requests, WaitTimeout("the client no longer waits for this request")
        )

    # Cancelling

    def cancel(self, request_id: str) -> Steps[Cancellation]:
        """Cancel a request, or have the leader cancel it where this user may not.

        Raises `WaitTimeout` where that does not succeed.
        """
        if self._may_cancel:
            try:
                return (yield from self._cancel(request_id))
            except NotPermitted:
                self._may_cancel = False
        return (yield from self._request_cancel(request_id))

    def _cancel(self, request_id: str) -> Steps[Cancellation]:
        """Cancel a request; raises `NotPermitted` where this user may not.

        Raises `WaitTimeout` where the request moves faster than it can be read.
        """
        for _ in range(scripts.CANCEL_ATTEMPTS):
            state, where = yield from self._place(request_id)
            code = yield scripts.cancel(
                self.state.keys, self.state.client_id, request_id, state=state, where=where
            )
            if code is not Cancelled.MOVED:
                break
        else:
            raise WaitTimeout(f"request {request_id!r} moved all the time; cancel it again")
        if code is Cancelled.CANCELLED_BEFORE_ARRIVAL:
            yield from self._catch_up(request_id)
        return Cancellation[code.name]

    def _request_cancel(self, request_id: str) -> Steps[Cancellation]:
        """Have the leader cancel a request; raises `WaitTimeout` where no leader does."""
        state = before = (yield from self._place(request_id))[0]
        give_up = clock.monotonic() + self.state.connect_timeout_s
        repeat_at, pause_s = 0.0, _FIRST_POLL_S
        while state not in TERMINAL:
            now = clock.monotonic()
            # Ask at least once, even where this process was stopped for all that time.
            if (repeat_at and now >= give_up) or self.state.is_closed:
                raise WaitTimeout(f"no coordinator has cancelled request {request_id!r} yet")
            if now >= repeat_at:
                keys, client_id = self.state.keys, self.state.client_id
                if not (yield scripts.request_cancel(keys, client_id, request_id)):
                    raise WaitTimeout("too many cancels wait for a coordinator; try again later")
                repeat_at = now + _REPEAT_S
            yield Delay(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
            state = (yield from self._place(request_id))[0]
        if before in TERMINAL or state != "cancelled":
            return Cancellation.OVER
        yield from self._catch_up(request_id)
        return Cancellation.CANCELLED if before else Cancellation.CANCELLED_BEFORE_ARRIVAL

    def _place(self, request_id: str) -> Steps[tuple[str, str]]:
        """State and place of a request, from its ledger."""
        ledger = self.state.keys.ledger(self.state.client_id, request_id)
        [seen] = yield Ask([("HMGET", ledger, *scripts.PLACE_FIELDS)])
        return scripts.place_of(seen)

    def _catch_up(self, request_id: str) -> Steps[None]:
        """Read the result from the ledger, since it may not come on this client's stream."""
        pending = self.state.router.find(request_id)
        if pending is not None:
            yield from self.state.catch_up([pending])

    # Listening

    def listen(self) -> Steps[None]:
        """Route replies until the client closes; survives a broker that goes away."""
        backoff, failures = Backoff(cap=2.0, base=0.05), 0
        while not self.state.is_closed:
            try:
                yield from self._read_once()
                failures = 0
            except BrokerUnavailable:
                failures += 1
                self.builder.broker_time.expire()
                yield Delay(backoff.compute(failures))

    def _read_once(self) -> Steps[None]:
        """Read replies, look up silent requests, renew the lease, delete what was read."""
        state, router = self.state, self.state.router
        if self.builder.broker_time.is_due:
            asked_at = clock.monotonic()
            [told] = yield Ask([("TIME",)])
            self.builder.broker_time.measured(told, asked_at)
        block_ms = IDLE_BLOCK_MS if router.is_idle else BLOCK_MS
        block = ("BLOCK", block_ms) if router.is_caught_up else ()
        stream = ("STREAMS", self._replies, router.cursor)
        [answer] = yield Ask([("XREAD", "COUNT", _READ_COUNT, *block, *stream)])
        if state.is_closed:
            return  # another client may use the name now
        entries = read_entries(answer)
        router.take(entries, clock.monotonic())
        is_behind = len(entries) == _READ_COUNT
        if not router.is_caught_up and not is_behind:
            router.catch_up()
        due = router.due(clock.monotonic(), is_behind=is_behind)
        if due:
            yield from state.read_ledgers(due)
        if state.lease.is_due(clock.monotonic()):
            ended = state.lease.take_ended(clock.monotonic())
            yield scripts.attend(state.keys, state.client_id, ended)
        first_kept = router.trim_from(clock.monotonic())
        if first_kept is not None:
            yield self._trim(first_kept)

    def leave(self) -> Steps[None]:
        """Cancel the requests that end with this client, and delete the replies that were read."""
        state, lease = self.state, self.state.lease
        unfinished = lease.unfinished()[:_MAX_CANCELS]
        if self._may_cancel:
            try:
                for request_id in unfinished:
                    yield from self._cancel(request_id)
                lease.end(unfinished)
            except NotPermitted:
                pass  # the coordinator cancels them once the lease has ended
        if lease.has_any:
            ended = lease.take_ended(clock.monotonic())
            yield scripts.attend(state.keys, state.client_id, ended, lease_ms=0)
        first_kept = state.router.trim_rest(clock.monotonic())
        if first_kept is not None:
            yield self._trim(first_kept)

    @property
    def _replies(self) -> str:
        return self.state.keys.replies(self.state.client_id)

    def _trim(self, first_kept: str) -> Ask:
        return Ask([("XTRIM", self._replies, "MINID", first_kept)])
