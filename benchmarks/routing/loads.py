"""The workloads of `benchmarks.routing`: sessions of one turn or of several, with known answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

#: The answer to a prompt, of so many tokens.
Answerer = Callable[[list[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and its answer."""

    prompt: list[int]
    answer: list[int]
    think_s: float  # before it


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of which each begins with all that was said before it."""

    name: str  # empty where there is one turn
    at_s: float  # when the first begins
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes that an engine can take."""

    vocabulary: int
    longest: int  # tokens of a prompt
    rate: float  # of sessions of one turn, per second; random beginnings (Poisson)
    heavy_rate: float
    session_rate: float
    turns: int
    said: int  # tokens that a turn adds, about
    answer: int  # tokens of an answer


_SHARED: Final = 64  # tokens that all sessions begin with
_UNIFORM: Final = 256
_HEAVY: Final = (200, 1.3)  # median and sigma of a lognormal
_HEAVY_ANSWER: Final = (8, 0.8)


class Loads:
    """Makes workloads; the same for the same seed, whatever policy is to route them."""

    def __init__(self, scale: Scale, answer: Answerer, seed: int) -> None:
        self._scale = scale
        self._answer = answer
        self._draw = random.Random(seed)

    def uniform(self, count: int) -> list[Session]:
        """Prompts and answers of one length."""
        sizes = ((_UNIFORM, self._scale.answer) for _ in range(count))
        return self._single(sizes, self._scale.rate)

    def heavy(self, count: int) -> list[Session]:
        """Lengths of which a few are very large (lognormal), as users' are."""
        sizes = ((self._lognormal(*_HEAVY), self._lognormal(*_HEAVY_ANSWER)) for _ in range(count))
        return self._single(sizes, self._scale.heavy_rate)

    def sessions(self, count: int) -> list[Session]:
        """So many requests, in conversations: each turn goes on behind the answer before."""
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
