"""From the replies to a request to what its front end gets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gateway.bridge import engine_core
from gateway.bridge.engine_core import FINISH_REASONS, Row, rows_of
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Result, to_delta, to_result
from tokenyard.protocol.wire import unpack_tokens

if TYPE_CHECKING:
    from gateway.bridge.engine_core import Channel, FailureForm
    from gateway.bridge.journal import Journal
    from gateway.bridge.requests import Asked
    from gateway.queue.replies import ReplyStream

#: After these the same may be asked again.
_RETRYABLE: Final = frozenset({Code.QUEUE_FULL, Code.QUOTA_EXCEEDED, Code.MODEL_UNAVAILABLE})


@dataclass(slots=True, eq=False)
class Answer:
    """A request that a front end waits for, and how much of its answer has gone there."""

    id: str  # the front end's
    prompt_tokens: int
    asked: Asked
    channel: Channel
    journal: Journal
    stream: ReplyStream | None = None
    timer: asyncio.TimerHandle | None = None
    #: Why it has failed.
    fault: str = ""
    #: Whether nobody waits for it any more.
    is_left: bool = False
    _prompt_rows: list[Row] | None = None
    _sent: int = 0
    _has_begun: bool = False

    def read(self, form: FailureForm) -> list[Any]:
        """What has come since the last call, for the front end."""
        found: list[Any] = []
        if self.stream is None:
            return found
        for reply in self.stream.take():
            if self._has_begun and not (reply.logprobs or self.asked.is_kept):
                tokens = unpack_tokens(reply.tokens)  # nearly all
                self._sent += len(tokens)
                found.append([self.id, tokens])
                continue
            delta = to_delta(reply)
            self._add(found, delta.tokens, delta.logprobs, delta.cached_tokens)
        pending = self.stream.pending
        if pending.error is not None:
            self._fail(found, str(pending.error), form=form)
        elif pending.final is not None:
            self._end(found, to_result(pending.final), form)
        return found

    def _add(
        self, found: list[Any], tokens: list[int], logprobs: list[Any] | None, cached: int | None
    ) -> None:
        self._sent += len(tokens)
        if not self.asked.is_kept or len(tokens) == 1:
            found.append(self._output(tokens, logprobs, cached))
            return
        # What the front end makes of it then depends on the tokens, not on the pieces in which
        # they came: asked again, the stream is the same.
        for at, token in enumerate(tokens):
            found.append(self._output([token], logprobs and logprobs[at : at + 1], cached))

    def _output(
        self, tokens: list[int], logprobs: list[Any] | None, cached: int | None, **end: Any
    ) -> list[Any]:
        if not self._has_begun:
            self._has_begun = True
            end |= {"prefill": (self.prompt_tokens, cached or 0), "prompt_rows": self._prompt_rows}
        return engine_core.output(self.id, tokens, rows=rows_of(logprobs), **end)

    def _fail(self, found: list[Any], why: str, **told: Any) -> None:
        self.fault = why
        found.append(engine_core.failed(self.id, why, **told))

    def _end(self, found: list[Any], result: Result, form: FailureForm) -> None:
        # A front end asks for one input at a time.
        error = result.error or (result.errors or {}).get(0)
        if not result.ok or error is not None:
            code = error.code if error else ""
            self._fail(
                found,
                error.message if error else "the request failed",
                form=form,
                is_invalid=code == Code.INVALID_REQUEST,
                retryable=code in _RETRYABLE,
            )
            return
        if result.data is not None and result.shapes:
            stop, numbers = FINISH_REASONS["stop"], (result.shapes[0] or [], result.data)
            found.append(self._output([], None, 0, finish=stop, pooled=numbers))
            return
        logprobs = result.logprobs or []
        rest, rows = result.tokens[self._sent :], logprobs[self._sent :]
        cached = result.usage.cached_tokens if result.usage else None
        self._prompt_rows = rows_of([entry for entry in result.prompt_logprobs or () if entry])
        if self.asked.is_kept and len(rest) > 1:
            self._add(found, rest[:-1], rows[:-1], cached)
            rest, rows = rest[-1:], rows[-1:]
        finish = FINISH_REASONS.get(result.finish_reason or "", FINISH_REASONS["stop"])
        found.append(self._output(rest, rows, cached, finish=finish, stop=result.stop_reason))
