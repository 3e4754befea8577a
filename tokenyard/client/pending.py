"""What a client knows of one request: the replies so far, and how to read them.

No I/O here. Replies may come twice (from the stream and from the ledger) or leave a hole (a
bounded stream was trimmed): every delta says how many tokens came before it, so that nothing is
shown twice or skipped (guarantee G3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenyard.client.tokenization import Detokenizer, LocalText
from tokenyard.protocol.errors import Code, RequestFailed, TokenyardError, WaitTimeout
from tokenyard.protocol.replies import (
    Choice,
    Delta,
    ErrorInfo,
    Reply,
    Result,
    status_of,
    to_delta,
    to_result,
)

Listener = Callable[["PendingRequest"], None]

_TOKEN_BYTES: Final = 4


class PendingRequest:
    """One request of this client and what came back. `Session` feeds it."""

    __slots__ = (
        "checked_at",
        "deltas",
        "digest",
        "eta_s",
        "fault",
        "final",
        "heard_at",
        "id",
        "is_interleaved",
        "is_submitted",
        "listeners",
        "local_text",
        "needs_tokens",
        "position",
        "published",
    )

    def __init__(self, request_id: str, local_text: LocalText | None, now: float) -> None:
        self.id = request_id
        self.local_text = local_text
        #: Of the request; empty where it is not known.
        self.digest = ""
        self.deltas: list[Reply] = []
        self.published = 0  # tokens in ``deltas``
        self.final: Reply | None = None
        self.fault: TokenyardError | None = None
        self.is_submitted = False
        #: Requests that were to be served before it, and their time in s: as it was submitted.
        self.position: int | None = None
        self.eta_s: float | None = None
        #: Whether the reply has several choices, which the ledger's tokens do not tell apart.
        self.is_interleaved = False
        #: Whether replies were missed, so that tokens must be fetched.
        self.needs_tokens = False
        self.heard_at = now
        self.checked_at = now
        #: Called after news, by whoever brings them: they must be quick and not raise.
        self.listeners: list[Listener] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.final is not None or self.fault is not None

    def take(self, reply: Reply, now: float) -> None:
        """Take in a reply, each token once."""
        if self.is_over:
            return
        self.heard_at = now
        if reply.event == "result":
            self.final = reply
        elif reply.seq > self.published:
            self.needs_tokens = True
            return
        elif not self._append(reply):
            return
        self._tell()

    def take_published(self, packed: bytes) -> None:
        """Fill a hole with the tokens that the ledger has; choices wait for their result."""
        self.needs_tokens = False
        if self.is_over or self.is_interleaved:
            return
        whole = Reply(id=self.id, event="delta", seq=0, tokens=packed)
        if self._append(whole):
            self._tell()

    def fail(self, fault: TokenyardError) -> None:
        """End without a result."""
        if not self.is_over:
            self.fault = fault
            self._tell()

    def _append(self, delta: Reply) -> bool:
        """Keep what is new of a delta that starts at or before what is known."""
        known = self.published - delta.seq
        new = len(delta.tokens) // _TOKEN_BYTES - known
        if new <= 0:
            return False
        if known:
            # Its text and logprobs cannot be cut: they come with the result.
            delta = Reply(
                id=delta.id,
                event="delta",
                seq=self.published,
                tokens=delta.tokens[known * _TOKEN_BYTES :],
                index=delta.index,
            )
        self.is_interleaved = self.is_interleaved or delta.index > 0
        self.deltas.append(delta)
        self.published += new
        return True

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener(self)

    def result(self) -> Result:
        """The result, whatever it is; only once `is_over`. Raises the fault if there is none."""
        if self.fault is not None:
            raise self.fault
        if self.final is None:
            raise AssertionError("asked for the result of a request that is not over")
        return _with_text(to_result(self.final), self.local_text)

    def success(self) -> Result:
        """`result`, where it is good; raises `RequestFailed` where it is not."""
        result = self.result()
        if not result.ok:
            raise RequestFailed(result)
        return result


def _with_text(result: Result, local: LocalText | None) -> Result:
    """A result with the text that was left to the client."""
    if local is None or result.text is not None:
        return result
    choices = result.choices and [
        msgspec.structs.replace(choice, text=local.whole(choice.tokens))
        for choice in result.choices
    ]
    return msgspec.structs.replace(result, text=local.whole(result.tokens), choices=choices)


class Patience:
    """A bound on one wait."""

    #: Longest single sleep: clocks of the operating system cannot sleep for ever.
    _NAP_S: Final = 3600.0

    def __init__(self, timeout_s: float | None, default_s: float) -> None:
        self._timeout_s = default_s if timeout_s is None else timeout_s
        self.renew()

    def renew(self) -> None:
        """Another wait begins, with the same bound."""
        self._give_up = time.monotonic() + self._timeout_s

    def left_s(self, exchange: PendingRequest) -> float:
        """How long to sleep at most; raises `WaitTimeout` when that is over."""
        left_s = self._give_up - time.monotonic()
        if left_s <= 0:
            raise WaitTimeout(
                f"request {exchange.id!r}: nothing new within {self._timeout_s:g} s; it goes on"
            )
        return min(left_s, self._NAP_S)


def rejected(request_id: str, code: Code, message: str) -> Result:
    """The result of a request that was not accepted."""
    return Result(id=request_id, status=status_of(code), tokens=[], error=ErrorInfo(code, message))


@dataclass(slots=True)
class _Shown:
    """How much of one choice a reader has seen."""

    tokens: int = 0
    text: int = 0  # characters
    detokenizer: Detokenizer | None = None
    #: A piece came without its text: the rest of the text waits for the result.
    is_text_held: bool = False


@dataclass(slots=True)
class DeltaCursor:
    """Reads the deltas of one exchange, from the first to the tail that rides in the result.

    All pieces together are the whole reply, tokens and text.
    """

    exchange: PendingRequest
    is_over: bool = False
    _at: int = 0
    _shown: dict[int, _Shown] = field(default_factory=dict)

    @property
    def has_news(self) -> bool:
        """Whether `read` has anything to give, or to raise."""
        return self._at < len(self.exchange.deltas) or self.exchange.is_over

    def read(self) -> Iterator[Delta]:
        """The pieces not read so far; then raises like `PendingRequest.success`."""
        # Before the deltas: none comes once it is over, but one may while we read.
        is_last = self.exchange.is_over
        while self._at < len(self.exchange.deltas):
            delta = to_delta(self.exchange.deltas[self._at])
            self._at += 1
            yield self._show(delta)
        if is_last:
            self.is_over = True
            result = self.exchange.result()
            yield from self._tail(result)
            if not result.ok:
                raise RequestFailed(result)

    def _choice(self, index: int) -> _Shown:
        shown = self._shown.get(index)
        if shown is None:
            local = self.exchange.local_text
            detokenizer = Detokenizer(local) if local is not None else None
            shown = self._shown[index] = _Shown(detokenizer=detokenizer)
        return shown

    def _show(self, delta: Delta) -> Delta:
        shown = self._choice(delta.index)
        text = _piece(shown, delta)
        shown.tokens += len(delta.tokens)
        shown.text += len(text or "")
        return delta if text is delta.text else msgspec.structs.replace(delta, text=text)

    def _tail(self, result: Result) -> Iterator[Delta]:
        whole = Choice(0, result.tokens, result.text, logprobs=result.logprobs)
        seq = self.exchange.published
        for choice in result.choices or [whole]:
            shown = self._choice(choice.index)
            tokens = choice.tokens[shown.tokens :]
            text = choice.text[shown.text :] if choice.text is not None else None
            if tokens or text:
                logprobs = choice.logprobs and choice.logprobs[shown.tokens :]
                yield Delta(result.id, seq, tokens, text, choice.index, logprobs)
            seq += len(tokens)


def _piece(shown: _Shown, delta: Delta) -> str | None:
    """The text to show with a delta: the worker's, or the client's own, never a mixture."""
    if shown.is_text_held:
        return None
    if delta.text is None and shown.detokenizer is not None:
        return shown.detokenizer.add(delta.tokens)
    if delta.text is None or (shown.detokenizer is not None and shown.tokens):
        shown.is_text_held = True
        return None
    shown.detokenizer = None
    return delta.text
