"""Several choices of a stream that continue after a crash, each behind its own published tokens.

vLLM runs each choice as a separate request, a *branch*; together they are one answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as changed

from tokenyard.protocol.replies import Choice
from worker.engines import EngineEvent, Finished, RequestError, TokenDelta
from worker.engines.vllm.collectors import Continued
from worker.engines.vllm.request import EngineRequest

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


class Branches:
    """The choices of one request and their outputs."""

    def __init__(self, asked: EngineRequest) -> None:
        self.asked = asked
        self.all: list[Branch] = []
        self.has_failed = False
        self._ended: dict[int, Finished] = {}

    @property
    def is_over(self) -> bool:
        """Whether the request is over: all choices have ended, or one has failed."""
        return self.has_failed or len(self._ended) == len(self.all)

    def end(self, index: int, made: Finished) -> Finished | None:
        """Record the end of a choice; returns the whole answer after the last one, else None."""
        self._ended[index] = made
        return self._joined() if len(self._ended) == len(self.all) else None

    def so_far(self) -> Finished:
        """The output of all choices so far."""
        for branch in self.all:
            self._ended.setdefault(branch.index, branch.answer.so_far())
        return self._joined()

    def _joined(self) -> Finished:
        made = [self._ended[index] for index in sorted(self._ended)]
        choices: list[Choice] = [
            changed(one.choices[0], index=index) for index, one in enumerate(made)
        ]
        told = [one for one in made if one.prompt_logprobs is not None]
        return changed((told or made)[0], choices=choices)


class Branch:
    """One choice: see `worker.engines.vllm.collectors.OutputCollector`."""

    def __init__(self, branches: Branches, index: int, answer: Continued) -> None:
        self.asked = answer.asked
        self.index = index
        self.answer = answer
        self.branches = branches
        branches.all.append(self)
        self._tokens = len(answer.asked.published)  # shown; the next line counts their characters
        self._chars = answer.shown_chars

    @property
    def request_id(self) -> str:
        """The request id in vLLM."""
        return f"{self.asked.key}#{self.index}"

    @property
    def is_finished(self) -> bool:
        """Whether this choice has ended."""
        return self.answer.is_finished

    def take(self, output: RequestOutput, events: list[EngineEvent]) -> None:
        """Add the events of one step of this choice."""
        made: list[EngineEvent] = []
        self.answer.take(output, made)
        for event in made:
            match event:
                case TokenDelta():
                    self._tokens += len(event.tokens)
                    self._chars += len(event.text or "")
                    events.append(changed(event, index=self.index))
                case Finished():
                    events += self.end(event)
                case RequestError():
                    self.branches.has_failed = True
                    events.append(event)

    def end(self, made: Finished) -> list[EngineEvent]:
        """End this choice; returns its last tokens, or the whole answer after the last choice."""
        whole = self.branches.end(self.index, made)
        if whole is not None:
            return [whole]
        choice = made.choices[0]
        tokens = choice.tokens[self._tokens :]
        text = None if choice.text is None else choice.text[self._chars :]
        if not tokens and not text:
            return []
        logprobs = None if choice.logprobs is None else choice.logprobs[self._tokens :]
        return [
            TokenDelta(
                self.asked.key,
                self.index,
                tokens,
                text,
                logprobs,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
        ]

    def so_far(self) -> Finished:
        """The output of all choices so far."""
        return self.branches.so_far()


def request_of_choice(asked: EngineRequest, index: int) -> EngineRequest:
    """The request of one choice, as if it were the only one."""
    assignment = asked.assignment
    params = changed(assignment.request.params, n=1)
    request = changed(assignment.request, params=params)
    return replace(
        asked,
        assignment=changed(assignment, request=request),
        published=asked.published_of(index),
        several=(),
    )
