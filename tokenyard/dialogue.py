"""The whole conversation of one client with its yard, without I/O.

Each method is a generator of `tokenyard.operations`: both clients carry them out and decide
nothing. A client must not run two of them at the same instant between two operations (the
synchronous client holds a lock there).
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tokenyard import scripts
from tokenyard.drafting import Draft, Drafter, Item, Prompt
from tokenyard.errors import (
    BrokerUnavailable,
    InvalidRequest,
    QueueFull,
    SettingsError,
    TokenyardError,
    WaitTimeout,
)
from tokenyard.exchange import Exchange
from tokenyard.handshake import YardInfo, shake_hands
from tokenyard.keys import Keys, is_name
from tokenyard.ledger import (
    RequestState,
    read_snapshots,
    read_status,
    snapshot_commands,
    status_commands,
)
from tokenyard.operations import Ask, Pause, Steps
from tokenyard.scripts import Acceptance, Submitted
from tokenyard.session import Session, read_entries
from tokenyard.tokenization import LocalText, load_tokenizer
from tokenyard.window import Numbered, Window
from tokenyard.wire import Request

#: Longest blocking read; also how long a hole in the replies may wait to be filled.
BLOCK_MS: Final = 1_000
_READ_COUNT: Final = 500
#: A burst of submissions ends at so many requests or bytes, since a script stops the server.
_MOST_REQUESTS: Final = 256
_MOST_BYTES: Final = 1024 * 1024
_FIRST_BACKOFF_S: Final = 0.05
_LONGEST_BACKOFF_S: Final = 2.0


class Dialogue:
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
        self._connect_timeout_s = connect_timeout_s
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self._drafter = Drafter(self.client_id, self._tokenizer)
        self._session = Session(time.monotonic())

    # Meeting the yard

    def meet(self) -> Steps[YardInfo]:
        """Shake hands; raises `NoCoordinator` or `ProtocolMismatch`."""
        info = yield from shake_hands(self.keys, self.url, self._connect_timeout_s)
        self._drafter.max_request_bytes = info.max_request_bytes
        self._drafter.clock_offset_s = info.clock_offset_s
        return info

    def close(self) -> None:
        """End all waiting; the requests go on, and their results stay in the ledger."""
        self.is_closed = True
        self._session.forget_all(WaitTimeout("the client was closed; the request goes on"))

    def break_off(self, fault: TokenyardError) -> None:
        """Nothing can be heard any more: tell everybody who waits why."""
        self._session.forget_all(fault)

    # Submitting

    def draft(self, prompt: Prompt, options: Mapping[str, Any]) -> Draft:
        """Read one request; raises `InvalidRequest`. Touches nothing but the tokenizer."""
        return self._drafter.draft(prompt, options)

    def draft_many(
        self, items: Sequence[Item], options: Mapping[str, Any]
    ) -> list[Draft | InvalidRequest]:
        """Read many; an error stands in the place of a bad one."""
        return self._drafter.draft_many(items, options)

    def submit(self, drafts: Sequence[Draft]) -> Steps[list[Exchange]]:
        """Submit a few or many; raises `QueueFull` if some found the intake full."""
        placed: list[Exchange] = []
        for burst in bursts(enumerate(drafts)):
            exchanges, retry_after_s = yield from self._submit_burst(burst)
            placed += exchanges.values()
            if retry_after_s is not None:
                raise QueueFull(retry_after_s, accepted=placed)
        return placed

    def submit_window(self, window: Window) -> Steps[bool]:
        """Submit what a `map` has ready; whether any was accepted."""
        rest = window.take_unsubmitted(time.monotonic())
        accepted = False
        for burst in list(bursts(rest)):
            try:
                exchanges, retry_after_s = yield from self._submit_burst(burst)
            except BrokerUnavailable:
                exchanges, retry_after_s = {}, _LONGEST_BACKOFF_S
            for index, exchange in exchanges.items():
                window.submitted(index, exchange)
            accepted = accepted or bool(exchanges)
            rest = [each for each in rest if each[0] not in exchanges]
            if retry_after_s is not None:
                window.refuse(rest, time.monotonic() + retry_after_s)
                break
        return accepted

    def _submit_burst(
        self, burst: Sequence[Numbered]
    ) -> Steps[tuple[dict[int, Exchange], float | None]]:
        """Submit in one call: what is under way now, and when the rest may try again."""
        now = time.monotonic()
        exchanges: dict[int, Exchange] = {}
        new: list[tuple[Request, Exchange]] = []
        for at, draft in burst:
            exchange = self._session.find(draft.request.id)
            if exchange is None:
                exchange = self._session.open(draft.request.id, draft.local_text, now)
                exchange.is_interleaved = draft.request.params.n > 1
                new.append((draft.request, exchange))
            exchanges[at] = exchange
        if not new:
            return exchanges, None
        try:
            acceptances = yield scripts.submit(
                self.keys, burst[0][1].priority_class, [request for request, _ in new]
            )
            refused = yield from self._accept([exchange for _, exchange in new], acceptances)
        except TokenyardError as fault:
            self._session.forget([exchange for _, exchange in new], fault)
            raise
        if not refused:
            return exchanges, None
        retry_after_s = max(acceptance.retry_after_ms for acceptance in acceptances) / 1000
        self._session.forget(refused, QueueFull(retry_after_s))
        return {at: each for at, each in exchanges.items() if each not in refused}, retry_after_s

    def _accept(
        self, exchanges: Sequence[Exchange], acceptances: Sequence[Acceptance]
    ) -> Steps[set[Exchange]]:
        """Take in the answers to a burst: those that found the intake full."""
        by_code: dict[Submitted, list[Exchange]] = {code: [] for code in Submitted}
        for exchange, acceptance in zip(exchanges, acceptances, strict=True):
            exchange.is_submitted = acceptance.code is not Submitted.FULL
            by_code[acceptance.code].append(exchange)
        if by_code[Submitted.KNOWN]:
            yield from self._catch_up(by_code[Submitted.KNOWN])
        return set(by_code[Submitted.FULL])

    # Requests from before

    def attach(self, request_id: str) -> Steps[Exchange]:
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

    def _catch_up(self, exchanges: Sequence[Exchange]) -> Steps[None]:
        """Bring requests from before up to what their ledgers say."""
        self._session.resume(exchanges)
        names = [exchange.id for exchange in exchanges]
        answers = yield Ask(snapshot_commands(self.keys, self.client_id, names))
        self._session.settle(exchanges, read_snapshots(answers))

    def status(self, request_id: str) -> Steps[RequestState]:
        """Read where a request stands; raises `UnknownRequest`."""
        answers = yield Ask(status_commands(self.keys, self.client_id, request_id))
        return read_status(request_id, answers)

    def forget(self, exchanges: Iterable[Exchange]) -> None:
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
        block = ("BLOCK", BLOCK_MS) if session.is_caught_up else ()
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
        first_kept = session.trim_from(time.monotonic())
        if first_kept is not None:
            yield self._trim(first_kept)

    def take_leave(self) -> Steps[None]:
        """Delete the replies that were read."""
        first_kept = self._session.trim_rest(time.monotonic())
        if first_kept is not None:
            yield self._trim(first_kept)

    @property
    def _replies(self) -> str:
        return self.keys.replies(self.client_id)

    def _trim(self, first_kept: str) -> Ask:
        return Ask([("XTRIM", self._replies, "MINID", first_kept)])


def bursts(drafts: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Requests in the order given, in groups that one script call should carry."""
    burst: list[Numbered] = []
    size = 0
    for index, draft in drafts:
        is_full = len(burst) == _MOST_REQUESTS or size + draft.size > _MOST_BYTES
        if burst and (is_full or draft.priority_class != burst[0][1].priority_class):
            yield burst
            burst, size = [], 0
        burst.append((index, draft))
        size += draft.size
    if burst:
        yield burst


def sound(drafts: Sequence[Draft | InvalidRequest]) -> list[Draft]:
    """The drafts, if all are good; raises the first error."""
    sound: list[Draft] = []
    for at, draft in enumerate(drafts):
        if isinstance(draft, InvalidRequest):
            raise InvalidRequest(f"items[{at}].{draft.field}", draft.message) from draft
        sound.append(draft)
    return sound
