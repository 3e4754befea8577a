"""One request of a client: its replies so far, and how to read them; without network.

Replies may come twice (from the stream and from the ledger) or leave a gap (a bounded stream was
trimmed). Every delta has the number of tokens before it, so that none is shown twice or skipped
(guarantee G3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenyard import clock
from tokenyard.client.options import Durability
from tokenyard.client.tokenization import Detokenizer, LocalText, local_text_of
from tokenyard.protocol.errors import RequestFailed, TokenyardError, WaitTimeout
from tokenyard.protocol.replies import Delta, Reply, Result, decode_cached, to_delta, to_result

Listener = Callable[["PendingRequest"], None]

_TOKEN_BYTES: Final = 4
#: Longest single sleep: operating systems do not accept infinite ones.
MAX_SLEEP_S: Final = 3600.0


@dataclass(slots=True, eq=False, repr=False)
class PendingRequest:
    """A request of this client and its replies, which `ReplyRouter` hands over."""

    id: str
    local_text: LocalText | None
    heard_at: float
    checked_at: float = 0.0
    #: Digest of the request; empty where it is not known.
    digest: str = ""
    #: Where it is known to be, beside the server's memory.
    durability: Durability = "memory"
    deltas: Sequence[Reply] = ()
    published: int = 0  # tokens in ``deltas``
    final: Reply | None = None
    error: TokenyardError | None = None
    is_submitted: bool = False
    #: At submission: the requests to be served before it, and their estimated time in s.
    position: int | None = None
    eta_s: float | None = None
    #: Whether the reply has several choices, which the ledger's tokens do not distinguish.
    is_interleaved: bool = False
    #: The yard's tokenizer, for tokens from the ledger, which has no text.
    folder: str = ""
    is_from_ledger: bool = False
    #: Whether replies were missed, so that tokens must be read from the ledger.
    needs_tokens: bool = False
    #: Called after each update, by the thread that reads replies; must be quick and not raise.
    listeners: list[Listener] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the request has its result or an error."""
        return self.final is not None or self.error is not None

    def take(self, reply: Reply, now: float) -> None:
        """Take a reply; tokens that are known already are dropped."""
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
        self._notify()

    def take_published(self, packed: bytes, cached: bytes | None = None) -> None:
        """Fill a gap with the ledger's tokens; several choices wait for their result."""
        self.needs_tokens = False
        if self.is_over or self.is_interleaved:
            return
        cached_tokens, created = decode_cached(cached)
        whole = Reply(
            id=self.id,
            event="delta",
            seq=0,
            tokens=packed,
            cached_tokens=cached_tokens,
            created_cache_tokens=created,
        )
        self.is_from_ledger = True
        if self._append(whole):
            self._notify()

    def fail(self, error: TokenyardError) -> None:
        """End without a result."""
        if not self.is_over:
            self.error = error
            self._notify()

    def _append(self, delta: Reply) -> bool:
        """Keep the new tokens of a delta that starts at or before the end of the known ones."""
        known = self.published - delta.seq
        new = len(delta.tokens) // _TOKEN_BYTES - known
        if new <= 0:
            return False
        if known:
            # Its text and logprobs cannot be split: they come with the result.
            delta = Reply(
                id=delta.id,
                event="delta",
                seq=self.published,
                tokens=delta.tokens[known * _TOKEN_BYTES :],
                index=delta.index,
            )
        self.is_interleaved = self.is_interleaved or delta.index > 0
        if isinstance(self.deltas, list):
            self.deltas.append(delta)
        else:
            self.deltas = [delta]  # most requests of a `map` have none
        self.published += new
        return True

    def _notify(self) -> None:
        for listener in tuple(self.listeners):
            listener(self)

    def result(self) -> Result:
        """The result, whatever its status; only once `is_over`. Raises `error` if there is none."""
        if self.error is not None:
            raise self.error
        if self.final is None:
            raise AssertionError("asked for the result of a request that is not over")
        return _with_text(to_result(self.final), self.local_text)


class SubmittedRequest:
    """What a handle shows without waiting."""

    def __init__(self, pending: PendingRequest) -> None:
        self._pending = pending

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}>"

    @property
    def id(self) -> str:
        """The id of the request."""
        return self._pending.id

    @property
    def position(self) -> int | None:
        """The number of requests before it in the queue when it was submitted.

        None where that is unknown: for a request that the yard had already.
        """
        return self._pending.position

    @property
    def eta_s(self) -> float | None:
        """The estimated time for the requests before it; None while the yard has no estimate."""
        return self._pending.eta_s


def succeeded(result: Result) -> Result:
    """The same result; raises `RequestFailed` where the request did not complete."""
    if not result.ok:
        raise RequestFailed(result)
    return result


def _with_text(result: Result, local: LocalText | None) -> Result:
    """The result with its text, where the client makes that."""
    if local is None or result.text is not None:
        return result
    choices = result.choices and [
        msgspec.structs.replace(choice, text=local.whole(choice.tokens))
        for choice in result.choices
    ]
    return msgspec.structs.replace(result, text=local.whole(result.tokens), choices=choices)


class WaitDeadline:
    """The deadline of one wait."""

    def __init__(self, timeout_s: float | None, default_s: float) -> None:
        self._timeout_s = default_s if timeout_s is None else timeout_s
        self.renew()

    def renew(self) -> None:
        """Start another wait with the same time-out."""
        self._give_up = clock.monotonic() + self._timeout_s

    def left_s(self, pending: PendingRequest) -> float:
        """The longest next sleep; raises `WaitTimeout` after the deadline."""
        left_s = self._give_up - clock.monotonic()
        if left_s <= 0:
            raise WaitTimeout(
                f"request {pending.id!r}: nothing new within {self._timeout_s:g} s; it continues"
            )
        return min(left_s, MAX_SLEEP_S)


@dataclass(slots=True)
class _ChoiceProgress:
    """How much of one choice was read."""

    tokens: int = 0
    text: int = 0  # characters
    detokenizer: Detokenizer | None = None
    #: A delta came without its text: the rest of the text comes with the result.
    is_text_withheld: bool = False


@dataclass(slots=True)
class DeltaCursor:
    """Reads the deltas of a request from the first on, and then what only its result has.

    All deltas together are the whole reply, tokens and text.
    """

    pending: PendingRequest
    is_over: bool = False
    _at: int = 0
    _progress: dict[int, _ChoiceProgress] = field(default_factory=dict)

    @property
    def has_updates(self) -> bool:
        """Whether `read` returns or raises anything now."""
        return self._at < len(self.pending.deltas) or self.pending.is_over

    @property
    def awaits_tokenizer(self) -> bool:
        """Whether the first delta still needs a tokenizer, whose loading from disk takes long."""
        pending = self.pending
        has_begun = self._at < 2 and pending.is_from_ledger and bool(pending.deltas)
        return has_begun and pending.deltas[0].text is None

    def read(self) -> Iterator[Delta]:
        """Yield the deltas not read so far; after the end, also what only the result has.

        It may load a tokenizer from disk, see `awaits_tokenizer`. Raises `RequestFailed` at the
        end of a request that failed, or the error that ended it.
        """
        # Before the loop: a delta may arrive during it, but none after the end.
        is_last = self.pending.is_over
        while self._at < len(self.pending.deltas):
            delta = to_delta(self.pending.deltas[self._at])
            self._at += 1
            yield self._with_text(delta)
        if is_last:
            self.is_over = True
            result = self.pending.result()
            yield from self._tail(result)
            succeeded(result)

    def _choice(self, index: int) -> _ChoiceProgress:
        shown = self._progress.get(index)
        if shown is None:
            local = self.pending.local_text
            detokenizer = Detokenizer(local) if local is not None else None
            shown = self._progress[index] = _ChoiceProgress(detokenizer=detokenizer)
        return shown

    def _with_text(self, delta: Delta) -> Delta:
        shown = self._choice(delta.index)
        if self.awaits_tokenizer and (local := local_text_of(self.pending.folder)):
            shown.detokenizer = shown.detokenizer or Detokenizer(local)
        text = _delta_text(shown, delta)
        if text is None and self.pending.is_from_ledger:
            text = ""  # it comes with the result
        shown.tokens += len(delta.tokens)
        shown.text += len(text or "")
        return delta if text is delta.text else msgspec.structs.replace(delta, text=text)

    def _tail(self, result: Result) -> Iterator[Delta]:
        seq = self.pending.published
        for choice in result.all_choices:
            shown = self._choice(choice.index)
            tokens = choice.tokens[shown.tokens :]
            text = choice.text[shown.text :] if choice.text is not None else None
            if tokens or text:
                logprobs = choice.logprobs and choice.logprobs[shown.tokens :]
                yield Delta(result.id, seq, tokens, text, choice.index, logprobs)
            seq += len(tokens)


def _delta_text(shown: _ChoiceProgress, delta: Delta) -> str | None:
    """The text of a delta: the worker's or the client's, never both."""
    if shown.is_text_withheld:
        return None
    if shown.detokenizer is not None and (delta.text is None or shown.tokens):
        return shown.detokenizer.add(delta.tokens)
    if delta.text is None:
        shown.is_text_withheld = True
        return None
    shown.detokenizer = None
    return delta.text
