"""The workloads of `benchmarks.routing`: sessions of one or more turns, with known answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

#: Maps a prompt and a number of tokens to the answer.
Answerer = Callable[[list[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and its answer."""

    prompt: list[int]
    answer: list[int]
    think_s: float  # pause before the request


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, each of which starts with all earlier prompts and answers."""

    name: str  # empty for a single turn
    at_s: float  # start of the first turn
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes that suit an engine."""

    vocabulary: int
    longest: int  # tokens of a prompt
    rate: float  # sessions of one turn per second; random starts (Poisson)
    heavy_rate: float
    session_rate: float
    turns: int
    said: int  # approximate tokens that a turn adds
    answer: int  # tokens of an answer


_SHARED: Final = 64  # tokens that all sessions start with
_UNIFORM: Final = 256
_HEAVY: Final = (200, 1.3)  # median and sigma of a lognormal
_HEAVY_ANSWER: Final = (8, 0.8)


class Loads:
    """Makes workloads, which depend only on the seed, not on the policy."""

    def __init__(self, scale: Scale, answer: Answerer, seed: int) -> None:
        self._scale = scale
        self._answer = answer
        self._draw = random.Random(seed)

    def uniform(self, count: int) -> list[Session]:
        """Prompts and answers of one length."""
        sizes = ((_UNIFORM, self._scale.answer) for _ in range(count))
        return self._single(sizes, self._scale.rate)

    def heavy(self, count: int) -> list[Session]:
        """Prompts and answers of lognormal length: a few are very long, as with real users."""
        sizes = ((self._lognormal(*_HEAVY), self._lognormal(*_HEAVY_ANSWER)) for _ in range(count))
        return self._single(sizes, self._scale.heavy_rate)

    def sessions(self, count: int) -> list[Session]:
        """Conversations with ``count`` requests in all; each turn continues the one before."""
        shared = self._tokens(_SHARED)
        beginnings = self._beginnings(self._scale.session_rate)
        return [
            Session(f"session-{number}", next(beginnings), list(self._conversation(shared)))
            for number in range(max(1, count // self._scale.turns))
        ]

    def _conversation(self, shared: list[int]) -> Iterator[Turn]:
        said = list(shared)
        for number in range(self._scale.turns):
            said += self._tokens(
                self._draw.randint(self._scale.said // 2, self._scale.said * 3 // 2)
            )
            answer = self._answer(said, self._scale.answer)
            yield Turn(list(said), answer, self._draw.expovariate(2.0) if number else 0.0)
            said += answer

    def _single(self, sizes: Iterator[tuple[int, int]], rate: float) -> list[Session]:
        beginnings = self._beginnings(rate)
        found = []
        for prompt_tokens, answer_tokens in sizes:
            prompt = self._tokens(min(prompt_tokens, self._scale.longest))
            turn = Turn(prompt, self._answer(prompt, answer_tokens), 0.0)
            found.append(Session("", next(beginnings), [turn]))
        return found

    def _beginnings(self, rate: float) -> Iterator[float]:
        at_s = 0.0
        while True:
            yield at_s
            at_s += self._draw.expovariate(rate)

    def _lognormal(self, median: int, sigma: float) -> int:
        return max(1, round(median * self._draw.lognormvariate(0.0, sigma)))

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._scale.vocabulary) for _ in range(count)]
