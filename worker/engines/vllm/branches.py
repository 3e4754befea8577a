"""Several choices of a stream that continue after a crash, each behind its own published tokens.

vLLM runs each choice as a separate request, a *branch*; together they are one answer.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace as changed

from tokenyard.protocol.replies import Choice
from worker.engines import EngineEvent, Finished, RequestError, TokenDelta
from worker.engines.vllm.collectors import Continued
from worker.engines.vllm.request import EngineRequest

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

logger = logging.getLogger("tokenyard.worker")


class Branches:
    """The choices of one request and their outputs."""

    def __init__(self) -> None:
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
    """One choice: see `worker.engines.vllm.engine.OutputCollector`."""

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
    def ends_request(self) -> bool:
        """Whether nothing of the request is left to run."""
        return self.branches.is_over

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
        by_choice=(asked.by_choice[index],),
    )


# Chooses how many tokens of a stream go out at a time.
#
# Mostly one. But with hundreds of streams a step on a GPU takes less time than Python needs for
# hundreds of single tokens. There vLLM holds a few tokens of each stream back and returns them
# together.

#: With fewer running requests each token goes out immediately.
FEW: Final = 32
#: Approximate time between pieces, in seconds; readers cannot tell it from single tokens.
PIECE_S: Final = 0.03
#: Most tokens of a piece; after a crash another process computes a lost piece again.
MOST: Final = 4
#: The shortest recent step counts, because prompts make steps longer; it rises by this factor.
_RISE: Final = 1.1


class PieceSize:
    """Chooses the size of a new stream's pieces by the number of requests and the time of steps."""

    def __init__(self, least: int) -> None:
        """``least`` is the operator's setting (vLLM's ``stream_interval``)."""
        self.least = least
        self._step_s = math.inf
        self._ended: float | None = None  # end of the last step, in seconds

    def note(self, running: int, now: float) -> None:
        """Record the end, at ``now`` seconds, of a step with ``running`` requests."""
        if running < FEW:
            self._ended = None
            return
        if self._ended is not None:
            self._step_s = min(now - self._ended, self._step_s * _RISE)
        self._ended = now

    def choose(self, running: int) -> int:
        """The number of tokens per piece for a new stream beside ``running`` requests."""
        if running < FEW:
            return self.least
        fitting = int(min(MOST, PIECE_S / max(self._step_s, PIECE_S / MOST)))
        return max(self.least, fitting)


# How far vLLM is with a request of which it returns nothing before the end.


def tokens_so_far(engine: Any, request_id: str) -> Sequence[list[int]]:
    """The tokens of each choice of a running request; none where this vLLM does not tell.

    Reads what vLLM's output processor has for the text of the answer, which is no public API.
    """
    try:
        processor = engine.output_processor
        ids = processor.external_req_ids.get(request_id, ())
        states = [processor.request_states[one] for one in ids]
        found = {one.request_index: list(one.detokenizer.output_token_ids) for one in states}
        for parent in {
            id(one.parent_req): one.parent_req for one in states if one.parent_req
        }.values():
            for output in parent.output_aggregator:  # of choices that have ended
                if output is not None:
                    found.setdefault(output.index, list(output.token_ids))
    except (AttributeError, KeyError, TypeError) as error:
        _warn(repr(error))
        return ()
    return [found[index] for index in sorted(found)]


@functools.cache
def _warn(error: str) -> None:
    """Once: it is asked each second."""
    logger.warning("vLLM does not tell the tokens of a request so far: %s", error)
