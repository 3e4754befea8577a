"""Turns vLLM's outputs to events: deltas, answers and errors.

There is one class for each way to run a request (`worker.engines.resume` explains them): `Whole`
does not stream, `Streamed` does, `Repeated` hides published tokens, and `Continued` joins the text
of published and new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from tokenyard.protocol.errors import Code, InvalidRequest
from tokenyard.protocol.replies import Choice
from worker.engines import EngineEvent, Finished, RequestError, TokenDelta
from worker.engines.logprobs import (
    Wanted,
    prompt_entries,
    token_entries,
    unknown,
    wanted,
    with_scores,
)
from worker.engines.vllm.request import EngineRequest

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    from worker.engines.resume import TextStream


class Diverged(Exception):
    """A repeated generation differs from the published tokens, first at token ``at``."""

    def __init__(self, at: int) -> None:
        super().__init__(f"token {at} differs from the published one")
        self.at = at


@dataclass(slots=True)
class _Growing:
    """The output of a choice so far."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Streamed:
    """A request whose output comes token by token."""

    def __init__(self, asked: EngineRequest) -> None:
        self.asked = asked
        self.is_finished = False
        self._streams = asked.assignment.request.stream
        self._shows_text = asked.assignment.request.wants_text
        self._logprobs = wanted(asked.params)
        self._prompt_logprobs: list[Any] | None = None
        self._cached: tuple[int | None, int | None] = None, None
        self._is_silent = True  # no delta was made yet
        self._choices = [_Growing() for _ in range(asked.params.n)]

    def take(self, output: RequestOutput, events: list[EngineEvent]) -> None:
        """Add the events of one step; raises `Diverged`."""
        if self._prompt_logprobs is None and (output.prompt_logprobs or _scores(output)):
            self._take_prompt_logprobs(output.prompt_logprobs or [], output)
        if self._cached == (None, None):
            self._cached = _cached(self.asked, output)
        for part in output.outputs:
            if part.finish_reason in ("abort", "error"):
                self.is_finished = True
                events.append(_fault(self.asked, part.finish_reason))
                return
            delta = self._grow(self._choices[part.index], part)
            if delta is not None and self._streams and not (output.finished or self.is_finished):
                if self._is_silent:
                    self._is_silent = False
                    cached, created = self._cached
                    delta = replace(delta, cached_tokens=cached, created_cache_tokens=created)
                events.append(delta)
        if output.finished or self.is_finished:
            self.is_finished = True
            events.append(self._finished())

    def _take_prompt_logprobs(self, found: Any, output: RequestOutput) -> None:
        self._prompt_logprobs = _prompt_logprobs(self.asked, found, output)

    def _grow(self, choice: _Growing, part: CompletionOutput) -> TokenDelta | None:
        """Add new output to a choice; returns it as a delta, or None if there is none."""
        tokens = part.token_ids
        choice.tokens.extend(tokens)
        choice.text += part.text
        choice.finish_reason = part.finish_reason
        choice.stop_reason = part.stop_reason
        return self._delta(choice, part, list(tokens), part.text)

    def _delta(
        self, choice: _Growing, part: CompletionOutput, tokens: list[int], text: str
    ) -> TokenDelta | None:
        if not tokens and not text:
            return None
        logprobs = None
        if self._logprobs is not None and part.logprobs is not None:
            # Never in vLLM's flat form, which we do not request.
            positions = cast("list[dict[int, Logprob]]", part.logprobs)
            logprobs = token_entries(tokens, positions[: len(tokens)], self._logprobs)
            choice.logprobs.extend(logprobs)
        return TokenDelta(
            self.asked.key,
            part.index,
            tokens,
            text if self._shows_text else None,
            logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def so_far(self) -> Finished:
        """The output so far, with at least the published tokens."""
        for choice in self._choices:
            choice.finish_reason = choice.finish_reason or "abort"
        pairs = list(zip(self._choices, self.asked.by_choice, strict=True))
        if all(len(choice.tokens) >= len(seen) for choice, seen in pairs):
            return self._finished()
        shown = [max(choice.tokens, seen, key=len) for choice, seen in pairs]
        choices = [Choice(index, tokens, None, "abort") for index, tokens in enumerate(shown)]
        return Finished(self.asked.key, choices, len(self.asked.prompt))

    def _finished(self) -> Finished:
        choices = [
            Choice(
                index,
                choice.tokens,
                choice.text if self._shows_text else None,
                choice.finish_reason,
                choice.stop_reason,
                choice.logprobs if self._logprobs is not None else None,
            )
            for index, choice in enumerate(self._choices)
        ]
        count = len(self.asked.prompt)
        return Finished(self.asked.key, choices, count, self._prompt_logprobs, *self._cached)


class Whole(Streamed):
    """A request that does not stream: vLLM returns all output at its end."""

    known: Sequence[list[int]] = ()  # tokens of each choice, for `so_far`

    def so_far(self) -> Finished:
        """The tokens that are `known`."""
        choices = [Choice(index, one, None, "abort") for index, one in enumerate(self.known)]
        return Finished(self.asked.key, choices, len(self.asked.prompt))


class Repeated(Streamed):
    """A stream that runs again from its start and shows only unpublished tokens."""

    def __init__(self, asked: EngineRequest) -> None:
        super().__init__(asked)
        #: Tokens of each choice that readers have after the last step that did not diverge.
        self.shown = asked.by_choice

    def take(self, output: RequestOutput, events: list[EngineEvent]) -> None:
        """Add the events of one step; one that diverges adds none."""
        before = len(events)
        try:
            super().take(output, events)
        except Diverged:
            del events[before:]
            raise
        grown = [choice.tokens for choice in self._choices]
        self.shown = tuple(
            list(tokens) if len(tokens) > len(seen) else seen
            for tokens, seen in zip(grown, self.shown, strict=True)
        )

    def _grow(self, choice: _Growing, part: CompletionOutput) -> TokenDelta | None:
        published = self.asked.by_choice[part.index]
        start = len(choice.tokens)
        seen = published[start : start + len(part.token_ids)]
        for at, (old, new) in enumerate(zip(seen, part.token_ids, strict=False), start):
            if old != new:
                raise Diverged(at)
        if part.finish_reason and start + len(part.token_ids) < len(published):
            raise Diverged(start + len(part.token_ids))
        delta = super()._grow(choice, part)
        if delta is None or len(seen) == len(delta.tokens):
            return None
        # A step of several tokens may span the seam: its text then belongs to the new tokens.
        logprobs = delta.logprobs[len(seen) :] if delta.logprobs is not None else None
        tokens = delta.tokens[len(seen) :]
        return replace(delta, tokens=tokens, logprobs=logprobs)


class Continued(Streamed):
    """A stream that continues after its published tokens, which vLLM sees as prompt.

    ``text`` is None if the request asks for neither text nor stop strings.
    """

    def __init__(self, asked: EngineRequest, text: TextStream | None) -> None:
        super().__init__(asked)
        self._text = text
        self._choices[0].tokens = list(asked.published)
        # Unless vLLM scores them as part of the prompt.
        self._choices[0].logprobs = [unknown(token) for token in asked.published]
        self.stopped: str | None = None  # the stop string at the end of the published tokens
        for token in asked.published:
            if text is not None:
                self.stopped = text.push(token)
        #: Characters shown with the published tokens.
        self.shown_chars = len(text.show()) if text is not None else 0

    def ended(self, finish_reason: str, stop_reason: int | str | None) -> Finished:
        """The answer if the published tokens are all of it."""
        choice = self._choices[0]
        choice.finish_reason, choice.stop_reason = finish_reason, stop_reason
        choice.text = self._text.text if self._text is not None else ""
        return self._finished()

    def _take_prompt_logprobs(self, found: Any, output: RequestOutput) -> None:
        """Separate the published tokens, which vLLM counts as prompt, from the prompt."""
        at = len(self.asked.prompt)
        if self._logprobs is not None and found:
            old = token_entries(self.asked.published, found[at:], self._logprobs)
            self._choices[0].logprobs = old
        self._prompt_logprobs = _prompt_logprobs(self.asked, found[:at], output)

    def _grow(self, choice: _Growing, part: CompletionOutput) -> TokenDelta | None:
        tokens = list(part.token_ids)
        choice.finish_reason = part.finish_reason
        choice.stop_reason = part.stop_reason
        if self._text is None:
            choice.tokens.extend(tokens)
            return self._delta(choice, part, tokens, "")
        tokens = tokens[: self._read(tokens, choice, self._text)]
        choice.tokens.extend(tokens)
        shown = self._text.show(finished=choice.finish_reason is not None)
        choice.text = self._text.text
        return self._delta(choice, part, tokens, shown)

    def _read(self, tokens: list[int], choice: _Growing, text: TextStream) -> int:
        """Turn tokens to text; returns the number of tokens that belong to the answer."""
        is_stopped = choice.finish_reason == "stop"
        hides_last = is_stopped and not self.asked.params.include_stop_str_in_output
        for at, token in enumerate(tokens):
            if hides_last and at == len(tokens) - 1:
                break
            stop = text.push(token)
            if stop is not None:
                choice.finish_reason, choice.stop_reason = "stop", stop
                self.is_finished = True
                return at + 1
        return len(tokens)


def _prompt_logprobs(asked: EngineRequest, found: Any, output: RequestOutput) -> list[Any] | None:
    top = asked.params.prompt_logprobs
    known = None if top is None or not found else prompt_entries(asked.prompt, found, Wanted(top))
    scores = _scores(output)
    return known if scores is None else with_scores(asked.prompt, known, asked.params, scores)


def _scores(output: RequestOutput) -> Any:
    """Scores of the ids named for prompt tokens; None in older versions of vLLM."""
    return getattr(output, "prompt_token_id_logprobs", None)


def _cached(asked: EngineRequest, output: RequestOutput) -> tuple[int | None, int | None]:
    """Prompt tokens from vLLM's prefix cache and new ones there, without published tokens."""
    found = output.num_cached_tokens
    if found is None:
        return None, None
    cached = min(found, len(asked.prompt))
    # Older versions of vLLM do not tell.
    created: int | None = getattr(output, "num_cache_creation_tokens", None)
    return cached, None if created is None else min(created, len(asked.prompt) - cached)


def _fault(asked: EngineRequest, reason: str) -> RequestError:
    if reason == "error" and asked.params.structured_outputs is not None:
        # vLLM logs the cause and does not tell it: the sampled token is refused by the grammar.
        return unfulfillable(asked.key, "none of the model's tokens fits what it allows")
    return RequestError(
        asked.key, Code.INFERENCE_ERROR, f"the engine ended the request with {reason!r}"
    )


def unfulfillable(key: str, why: str) -> RequestError:
    """The error of a constraint on the text that no attempt could meet."""
    refused = InvalidRequest("params.structured_outputs", why)
    return RequestError(key, Code.INVALID_REQUEST, str(refused))
