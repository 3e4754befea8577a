"""The whole conversation of one client with its yard, without I/O.

Each method is a generator of `tokenyard.client.operations`: both clients carry them out and decide
nothing. A client must not run two of them at the same instant between two operations (the
synchronous client holds a lock there).
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tokenyard import scripts
from tokenyard.broker.outage import Outage
from tokenyard.broker.url import user_of
from tokenyard.client.build import Item, PreparedRequest, Prompt, RequestBuilder
from tokenyard.client.durability import wait_command, why_not
from tokenyard.client.guest import Guest
from tokenyard.client.handshake import YardInfo, shake_hands
from tokenyard.client.lease import ClientLease
from tokenyard.client.ledger import (
    Cancellation,
    RequestState,
    place_command,
    read_snapshots,
    read_status,
    snapshot_commands,
    status_commands,
)
from tokenyard.client.operations import Ask, Operation, Pause, Steps
from tokenyard.client.pending import PendingRequest
from tokenyard.client.router import ReplyRouter, read_entries
from tokenyard.client.tokenization import LocalText, load_tokenizer
from tokenyard.client.window import MapWindow, Numbered
from tokenyard.protocol.errors import (
    BrokerUnavailable,
    DeadlineUnmeetable,
    IdReused,
    InvalidRequest,
    NotDurable,
    NotPermitted,
    QueueFull,
    SettingsError,
    TokenyardError,
    WaitTimeout,
)
from tokenyard.protocol.keys import Keys, is_name
from tokenyard.protocol.receipts import owns
from tokenyard.protocol.replies import TERMINAL
from tokenyard.protocol.wire import Request, RequestTemplate, template_of
from tokenyard.scripts import (
    CANCEL_LOOKS,
    Acceptance,
    Call,
    Cancelled,
    CancelRequested,
    Submitted,
    place_of,
)
from tokenyard.telemetry import tracing

log = logging.getLogger("tokenyard.client.sync")

#: Longest blocking read; also how long a hole in the replies may wait to be filled.
BLOCK_MS: Final = 1_000
#: The same for a client that has nothing under way: a reply to what it submits meanwhile ends the
#: read. Shorter than the silence after which a request is looked up, so that this is not delayed.
IDLE_BLOCK_MS: Final = 3_000
_READ_COUNT: Final = 500
#: A burst of submissions ends at so many requests or bytes, since a script stops the server.
_MOST_REQUESTS: Final = 256
_MOST_BYTES: Final = 1024 * 1024
#: A client that closes cancels so many requests itself; the coordinator cancels the rest.
_MOST_CANCELLED: Final = 100
#: Between looks whether the leader has granted a wish, and between its repetitions.
_FIRST_LOOK_S: Final = 0.002
_LONGEST_LOOK_S: Final = 0.2
_CANCEL_AGAIN_S: Final = 1.0
_FIRST_BACKOFF_S: Final = 0.05
_LONGEST_BACKOFF_S: Final = 2.0
_ACCEPTED: Final = Submitted.ACCEPTED  # an enumeration takes its time to say it


@dataclass(slots=True)
class _Answer:
    """What became of the requests of one submission, by their numbers."""

    placed: Mapping[int, PendingRequest]  # under way now
    refused: dict[int, DeadlineUnmeetable | IdReused] = field(default_factory=dict)
    retry_after_s: float | None = None  # for those that are in neither
    doubt: NotDurable | None = None  # whether those that were placed are as safe as was asked for


class ClientCore:
    """What one client says and hears."""

    def __init__(
        self,
        url: str,
        yard: str,
        client_id: str | None,
        tokenizer: object | None,
        connect_timeout_s: float,
        result_timeout_s: float,
    ) -> None:
        self.client_id = client_id if client_id is not None else f"client-{secrets.token_hex(8)}"
        faults = [
            f"{label} {name!r}: use 1 to 100 of A-Z a-z 0-9 _ . : @ -"
            for label, name in (("yard", yard), ("client_id", self.client_id))
            if not is_name(name)
        ]
        if faults:
            raise SettingsError(faults)
        self.url = url
        self.keys = Keys(yard)
        self.result_timeout_s = result_timeout_s
        self.is_closed = False
        self.connect_timeout_s = connect_timeout_s
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self._builder = RequestBuilder(self.client_id, self._tokenizer)
        self._session = ReplyRouter(time.monotonic())
        self._client_lease = ClientLease()
        self._outage = Outage(log, f"submitting to yard {yard}")
        self._may_cancel = True  # until the server says otherwise
        self._has_met = False
        self._guest: Guest | None = None  # where the yard does not trust this client's user

    # Meeting the yard

    def meet(self) -> Steps[YardInfo]:
        """Shake hands; raises `NoCoordinator`, `BrokerNotWritable` or `ProtocolMismatch`."""
        info = yield from shake_hands(self.keys, self.url, self.connect_timeout_s)
        self._builder.max_request_bytes = info.max_request_bytes
        self._builder.clock_offset_s = info.clock_offset_s
        self._has_met = True
        if info.is_guest and self._guest is None:
            self._may_cancel = False
            self._guest = self._as_guest(user_of(self.url))
        return info

    def _as_guest(self, user: str) -> Guest:
        if not owns(user, self.client_id):
            raise SettingsError(
                [f"client_id {self.client_id!r}: for the guest {user} use it or {user}-..."]
            )
        return Guest(user, self.client_id, self.keys, self._session)

    def patience_s(self, call: Call[Any]) -> float:
        """How long a script is waited for that the server has not got; `probe` says what is now."""
        return 0.0 if call.script == "probe" else self.connect_timeout_s

    def close(self) -> None:
        """End all waiting; `take_leave` cancels what is to be cancelled, other requests go on."""
        self.is_closed = True
        attached = [self._session.find(name) for name in self._client_lease.unfinished()]
        fault = WaitTimeout("the client was closed, and the request is cancelled with it")
        self._session.forget([each for each in attached if each is not None], fault)
        self._session.forget_all(WaitTimeout("the client was closed; the request goes on"))

    def break_off(self, fault: TokenyardError) -> None:
        """Nothing can be heard any more: tell everybody who waits why."""
        self._session.forget_all(fault)

    # Submitting

    def draft(self, prompt: Prompt, options: Mapping[str, Any]) -> PreparedRequest:
        """Read one request; raises `InvalidRequest`. Touches nothing but the tokenizer."""
        return self._builder.draft(prompt, options)

    def draft_many(
        self, items: Sequence[Item], options: Mapping[str, Any]
    ) -> list[PreparedRequest | InvalidRequest]:
        """Read many; an error stands in the place of a bad one."""
        return self._builder.draft_many(items, options)

    def submit(self, drafts: Sequence[PreparedRequest]) -> Steps[list[PendingRequest]]:
        """Submit a few or many; raises at the first burst of which one is refused.

        Raises `QueueFull`, `DeadlineUnmeetable`, `IdReused` or `NotDurable`.
        """
        placed: list[PendingRequest] = []
        for burst in bursts(enumerate(drafts)):
            answer = yield from self._submit_burst(burst)
            placed += answer.placed.values()
            if answer.doubt is not None:
                answer.doubt.accepted = placed
                raise answer.doubt
            if answer.retry_after_s is not None:
                raise QueueFull(answer.retry_after_s, accepted=placed)
            for fault in answer.refused.values():
                fault.accepted = placed
                raise fault
        return placed

    def submit_window(self, window: MapWindow) -> Steps[bool]:
        """Submit what a `map` has ready; whether any was accepted."""
        rest = window.take_unsubmitted(time.monotonic())
        accepted = False
        for burst in list(bursts(rest)):
            try:
                answer = yield from self._submit_burst(burst)
            except BrokerUnavailable as fault:
                window.fault = fault
                self._outage.note(fault)
                answer = _Answer({}, retry_after_s=_LONGEST_BACKOFF_S)
            else:
                window.fault = None
                self._outage.over()
            for index, exchange in answer.placed.items():
                window.submitted(index, exchange)
            if answer.doubt is not None:
                raise answer.doubt
            if answer.refused:
                names = {index: draft.request.id for index, draft in burst}
                window.reject({at: (names[at], fault) for at, fault in answer.refused.items()})
            accepted = accepted or bool(answer.placed)
            done = answer.placed.keys() | answer.refused.keys()
            rest = [each for each in rest if each[0] not in done]
            if answer.retry_after_s is not None:
                window.refuse(rest, time.monotonic() + answer.retry_after_s)
                break
        return accepted

    def give_up(self, window: MapWindow) -> Steps[TokenyardError]:
        """Why a `map` has waited in vain: the broker, where it is the cause."""
        fault = window.fault
        if fault is None:
            try:
                yield scripts.probe(self.keys)
            except BrokerUnavailable as error:
                fault = error
            except TokenyardError:
                pass  # a user who may not ask
        return fault or WaitTimeout(f"no result for {self.result_timeout_s:g} s")

    def _submit_burst(self, burst: Sequence[Numbered]) -> Steps[_Answer]:
        """Submit in one call what has the same terms."""
        now = time.monotonic()
        exchanges: dict[int, PendingRequest] = {}
        reused: dict[int, DeadlineUnmeetable | IdReused] = {}
        new: list[tuple[Request, RequestTemplate, PendingRequest]] = []
        sending = tracing.sending(self.keys.yard)
        for at, draft in burst:
            exchange = self._session.find(draft.request.id)
            if exchange is None:
                exchange = self._session.open(draft.request.id, draft.local_text, now)
                exchange.digest = draft.digest
                exchange.is_interleaved = draft.request.params.n > 1
                request, template = draft.request, draft.request_template
                if sending and self._builder.has_room(draft, tracing.ROOM):
                    request, template = sending.carry(request), None
                new.append((request, template or template_of(request), exchange))
            elif exchange.digest not in ("", draft.digest):
                reused[at] = IdReused(exchange.id)
                continue
            exchanges[at] = exchange
        if not new:
            return _Answer(exchanges, reused)
        fresh = [exchange for *_, exchange in new]
        terms = burst[0][1]
        try:
            acceptances, why = yield from self._offer(terms, new)
            known = _take_acceptances(fresh, acceptances)
            if sending:
                names = (exchange.id for exchange in fresh)
                sending.end(dict(zip(names, (one.code.name for one in acceptances), strict=True)))
            if terms.cancel_on_disconnect:
                self._client_lease.attach([each for each in fresh if each.is_submitted], now)
            if known:
                yield from self._catch_up(known)
        except TokenyardError as fault:
            if sending:
                sending.end({}, fault)
            self._session.forget(fresh, fault)
            raise
        answer = self._refuse(exchanges, dict(zip(fresh, acceptances, strict=True)))
        answer.refused.update(reused)
        if why:
            answer.doubt = NotDurable(terms.durability, why)
        return answer

    def _offer(
        self, terms: PreparedRequest, new: Sequence[tuple[Request, RequestTemplate, PendingRequest]]
    ) -> Steps[tuple[list[Acceptance], str]]:
        """Submit requests by script, or as a guest by the inbox.

        With why they are not known to be as safe as was asked for, "" where they are.
        """
        requests, templates = [request for request, *_ in new], [template for _, template, _ in new]
        if self._guest is not None:
            return (
                yield from self._guest.submit(
                    terms.priority_class,
                    requests,
                    templates,
                    is_watched=terms.cancel_on_disconnect,
                    refuse_late=terms.refuse_late,
                    durability=terms.durability,
                    patience_s=self.connect_timeout_s,
                )
            )
        call = scripts.submit(
            self.keys,
            terms.priority_class,
            requests,
            watched=self.client_id if terms.cancel_on_disconnect else "",
            refuse_late=terms.refuse_late,
            templates=templates,
            digests=[exchange.digest for *_, exchange in new],
        )
        wait = wait_command(terms.durability)
        if wait is None:
            return (yield call), ""
        yield scripts.submit(self.keys, terms.priority_class, [])  # the server has the script now
        answer, waited = yield Ask([scripts.command_of(call)], wait)
        return call.read(answer), why_not(terms.durability, waited)

    def _refuse(
        self,
        exchanges: Mapping[int, PendingRequest],
        acceptances: Mapping[PendingRequest, Acceptance],
    ) -> _Answer:
        """Forget what was not accepted of the requests of a burst, and say why."""
        if all(exchange.is_submitted for exchange in acceptances):
            return _Answer(exchanges)
        placed: dict[int, PendingRequest] = {}
        answer = _Answer(placed)
        for at, exchange in exchanges.items():
            acceptance = acceptances.get(exchange)
            if acceptance is None or exchange.is_submitted:
                placed[at] = exchange
            elif acceptance.code is Submitted.LATE:
                answer.refused[at] = DeadlineUnmeetable(acceptance.eta_ms / 1000)
                self._session.forget([exchange], answer.refused[at])
            elif acceptance.code is Submitted.REUSED:
                answer.refused[at] = IdReused(exchange.id)
                self._session.forget([exchange], answer.refused[at])
            else:
                retry_after_s = acceptance.retry_after_ms / 1000
                answer.retry_after_s = max(answer.retry_after_s or 0.0, retry_after_s)
                self._session.forget([exchange], QueueFull(retry_after_s))
        return answer

    # Requests from before

    def attach(self, request_id: str) -> Steps[PendingRequest]:
        """Follow a request that was submitted earlier; raises `UnknownRequest`."""
        exchange = self._session.find(request_id)
        if exchange is None:
            local_text = LocalText(self._tokenizer) if self._tokenizer is not None else None
            exchange = self._session.open(request_id, local_text, time.monotonic())
            exchange.is_submitted = True
            try:
                yield from self._catch_up([exchange])
            except TokenyardError as fault:
                self._session.forget([exchange], fault)
                raise
            if exchange.fault is not None:
                raise exchange.fault
        return exchange

    def _catch_up(self, exchanges: Sequence[PendingRequest]) -> Steps[None]:
        """Bring requests from before up to what their ledgers say."""
        self._session.resume(exchanges)
        names = [exchange.id for exchange in exchanges]
        answers = yield Ask(snapshot_commands(self.keys, self.client_id, names))
        self._session.settle(exchanges, read_snapshots(answers))

    def status(self, request_id: str) -> Steps[RequestState]:
        """Read where a request stands; raises `UnknownRequest`."""
        answers = yield Ask(status_commands(self.keys, self.client_id, request_id))
        return read_status(request_id, answers)

    def cancel(self, request_id: str) -> Steps[Cancellation]:
        """Cancel a request wherever it is; raises `WaitTimeout` where it cannot be got hold of.

        Without the right to do so it asks the leader to.
        """
        if self._may_cancel:
            try:
                return (yield from self._cancel(request_id))
            except NotPermitted:
                self._may_cancel = False
                if not self._has_met:
                    yield from self.meet()  # a guest has another way
        return (yield from self._wish(request_id))

    def _cancel(self, request_id: str) -> Steps[Cancellation]:
        for _ in range(CANCEL_LOOKS):
            [seen] = yield Ask([place_command(self.keys, self.client_id, request_id)])
            state, where = place_of(seen)
            code = yield scripts.cancel(
                self.keys, self.client_id, request_id, state=state, where=where
            )
            if code is not Cancelled.MOVED:
                break
        else:
            raise WaitTimeout(f"request {request_id!r} moved all the time; cancel it again")
        exchange = self._session.find(request_id)
        if exchange is not None and code is Cancelled.CANCELLED_BEFORE_ARRIVAL:
            yield from self._catch_up([exchange])  # its result is not in our stream
        return Cancellation[code.name]

    def _wish(self, request_id: str) -> Steps[Cancellation]:
        """Have the leader cancel a request; raises `WaitTimeout` where none does."""
        state = before = yield from self._state(request_id)
        give_up = time.monotonic() + self.connect_timeout_s
        again, pause_s = 0.0, _FIRST_LOOK_S
        while state not in TERMINAL:
            now = time.monotonic()
            if now >= give_up or self.is_closed:
                raise WaitTimeout(f"no coordinator has cancelled request {request_id!r} yet")
            if now >= again:
                # More than once: who was to hear of it may have died.
                if self._guest is not None:
                    yield self._guest.cancel(request_id)
                elif (
                    yield scripts.request_cancel(self.keys, self.client_id, request_id)
                ) is CancelRequested.FULL:
                    raise WaitTimeout("too many cancels wait for a coordinator; try again later")
                again = now + _CANCEL_AGAIN_S
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
            state = yield from self._state(request_id)
        if before in TERMINAL or state != "cancelled":
            return Cancellation.OVER
        exchange = self._session.find(request_id)
        if exchange is not None:
            yield from self._catch_up([exchange])  # its result may not be in our stream
        return Cancellation.CANCELLED if before else Cancellation.CANCELLED_BEFORE_ARRIVAL

    def _state(self, request_id: str) -> Steps[str]:
        [seen] = yield Ask([place_command(self.keys, self.client_id, request_id)])
        return place_of(seen)[0]

    def forget(self, exchanges: Iterable[PendingRequest]) -> None:
        """Follow these no longer."""
        self._session.forget(exchanges, WaitTimeout("nobody waits for this request any more"))

    # Hearing

    def listen(self) -> Steps[None]:
        """Hand over replies until the client closes; survives a server that goes away."""
        backoff_s = _FIRST_BACKOFF_S
        while not self.is_closed:
            try:
                yield from self._hear()
                backoff_s = _FIRST_BACKOFF_S
            except BrokerUnavailable:
                yield Pause(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _hear(self) -> Steps[None]:
        """One turn: read replies, look up silent requests, delete what was read."""
        session = self._session
        patience_ms = IDLE_BLOCK_MS if session.is_idle else BLOCK_MS
        block = ("BLOCK", patience_ms) if session.is_caught_up else ()
        stream = ("STREAMS", self._replies, session.cursor)
        [answer] = yield Ask([("XREAD", "COUNT", _READ_COUNT, *block, *stream)])
        if self.is_closed:
            return  # the name may be another's by now
        entries = read_entries(answer)
        session.take(entries, time.monotonic())
        is_behind = len(entries) == _READ_COUNT
        if not session.is_caught_up and not is_behind:
            session.catch_up()
        due = session.due(time.monotonic(), is_behind=is_behind)
        if due:
            names = [exchange.id for exchange in due]
            answers = yield Ask(snapshot_commands(self.keys, self.client_id, names))
            session.settle(due, read_snapshots(answers))
        if self._client_lease.is_due(time.monotonic()):
            ended = self._client_lease.take_ended(time.monotonic())
            yield self._attend(ended)
        first_kept = session.trim_from(time.monotonic())
        if first_kept is not None:
            yield self._trim(first_kept)

    def take_leave(self) -> Steps[None]:
        """Cancel what was to end with this client, and delete the replies that were read."""
        client_lease = self._client_lease
        unfinished = client_lease.unfinished()[:_MOST_CANCELLED]
        if self._may_cancel:
            try:
                for name in unfinished:
                    yield from self._cancel(name)
                client_lease.end(unfinished)
            except NotPermitted:
                pass  # the coordinator will, at our good-bye
        if client_lease.has_any:
            ended = client_lease.take_ended(time.monotonic())
            yield self._attend(ended, leaves=True)
        first_kept = self._session.trim_rest(time.monotonic())
        if first_kept is not None:
            yield self._trim(first_kept)

    def _attend(self, ended: Sequence[str], *, leaves: bool = False) -> Operation:
        if self._guest is not None:
            return self._guest.attend(ended, leaves=leaves)
        lease_ms = 0 if leaves else scripts.CLIENT_LEASE_MS
        return scripts.attend(self.keys, self.client_id, ended, lease_ms=lease_ms)

    @property
    def _replies(self) -> str:
        return self.keys.replies(self.client_id)

    def _trim(self, first_kept: str) -> Ask:
        return Ask([("XTRIM", self._replies, "MINID", first_kept)])


def _take_acceptances(
    exchanges: Sequence[PendingRequest], acceptances: Sequence[Acceptance]
) -> list[PendingRequest]:
    """Take in the answers to a burst; those requests that the yard knew before."""
    known: list[PendingRequest] = []
    for exchange, acceptance in zip(exchanges, acceptances, strict=True):
        if acceptance.code is _ACCEPTED:
            exchange.is_submitted = True
            exchange.position = acceptance.position
            exchange.eta_s = acceptance.eta_ms / 1000 if acceptance.eta_ms >= 0 else None
        elif acceptance.code is Submitted.KNOWN:
            exchange.is_submitted = True
            known.append(exchange)
    return known


def bursts(drafts: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Requests in the order given, in groups that one script call should carry."""
    burst: list[Numbered] = []
    size, terms = 0, None
    for numbered in drafts:
        draft = numbered[1]
        is_full = len(burst) == _MOST_REQUESTS or size + draft.size > _MOST_BYTES
        if burst and (is_full or draft.terms != terms):
            yield burst
            burst, size = [], 0
        if not burst:
            terms = draft.terms
        burst.append(numbered)
        size += draft.size
    if burst:
        yield burst


def sound(drafts: Sequence[PreparedRequest | InvalidRequest]) -> list[PreparedRequest]:
    """The drafts, if all are good; raises the first error."""
    sound: list[PreparedRequest] = []
    for at, draft in enumerate(drafts):
        if isinstance(draft, InvalidRequest):
            raise InvalidRequest(f"items[{at}].{draft.field}", draft.message) from draft
        sound.append(draft)
    return sound
