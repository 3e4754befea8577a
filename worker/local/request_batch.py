"""Requests submitted together, and their replies."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator, Sequence

from tokenyard import clock
from tokenyard.protocol.errors import EngineLost, WaitTimeout
from tokenyard.protocol.replies import Choice, Delta, Reply, Result, to_delta, to_result
from tokenyard.protocol.wire import Assignment, Request


class RequestBatch:
    """Requests to one engine; the pool's thread adds replies, one other thread consumes them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.assignments = {f"{one.id}-0": _assignment(one) for one in requests}
        self.unanswered = dict.fromkeys(self.assignments)  # an ordered set
        self._replies: queue.SimpleQueue[tuple[str, Reply] | Exception] = queue.SimpleQueue()

    # The pool's thread

    def take(self, entry: str, reply: Reply) -> None:
        """Add a delta or the result of one of the requests."""
        self._replies.put((entry, reply))

    def fail(self, error: Exception) -> None:
        """Fail all requests."""
        self._replies.put(error)

    # The thread that asks

    def results(self, timeout_s: float) -> list[Result]:
        """Wait for all results; returns them in the order of the requests.

        Raises `EngineLost`, with the results so far, and `WaitTimeout` if nothing arrives for
        ``timeout_s``.
        """
        found: dict[str, Result] = {}
        try:
            while self.unanswered:
                entry, reply = self._next(timeout_s)
                found[entry] = to_result(reply)
        except EngineLost as error:
            error.results = [found.get(entry) for entry in self.assignments]
            raise
        return [found[entry] for entry in self.assignments]

    def stream(self, timeout_s: float) -> Iterator[Delta | Result]:
        """Yield the deltas of a single request, then its result.

        The deltas add up to the whole answer. Raises like `results`.
        """
        shown = _StreamProgress()
        while self.unanswered:
            _, reply = self._next(timeout_s)
            if reply.event == "delta":
                yield shown.note(to_delta(reply))
            else:
                result = to_result(reply)
                yield from shown.rest(result)
                yield result

    def _next(self, timeout_s: float) -> tuple[str, Reply]:
        try:
            news = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            left = len(self.unanswered)
            raise WaitTimeout(
                f"no answer for {timeout_s:g} s; {left} requests were given up"
            ) from None
        if isinstance(news, Exception):
            self.unanswered.clear()
            raise news
        entry, reply = news
        if reply.event == "result":
            self.unanswered.pop(entry, None)
        return entry, reply


def _assignment(request: Request) -> Assignment:
    """Make the assignment of a request that did not queue."""
    sid = f"local/{clock.wall_ms()}-{request.id}"
    return Assignment(request=request, entry=f"{request.id}-0", sid=sid, attempt=1)


class _StreamProgress:
    """How much of each choice of a streamed answer was yielded."""

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()
        self._characters: Counter[int] = Counter()

    def note(self, delta: Delta) -> Delta:
        """Count a delta before it is yielded; returns it."""
        self._tokens[delta.index] += len(delta.tokens)
        self._characters[delta.index] += len(delta.text or "")
        return delta

    def rest(self, result: Result) -> Iterator[Delta]:
        """Yield the tokens that arrived only with the result."""
        seq = self._tokens.total()
        whole = Choice(0, result.tokens, result.text, logprobs=result.logprobs)
        for choice in result.choices or [whole]:
            at = self._tokens[choice.index]
            tokens = choice.tokens[at:]
            text = choice.text and choice.text[self._characters[choice.index] :]
            if tokens or text:
                logprobs = choice.logprobs and choice.logprobs[at:]
                yield Delta(result.id, seq, tokens, text, choice.index, logprobs)
            seq += len(tokens)
