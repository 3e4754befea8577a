"""Questions for the two arithmetic models (`examples/arithmetic`), with their answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ADDER: Final = "adder"
SUBTRACTOR: Final = "subtractor"
#: More tokens than the longest answer has.
ANSWER_TOKENS: Final = 6


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, its model and the right answer."""

    model: str
    prompt: str
    answer: str


def questions(models: Sequence[str], count: int) -> list[Question]:
    """Make ``count`` questions for the models in turn, the same in each run."""
    draw = random.Random(count)
    return [_question(model, draw) for model in itertools.islice(itertools.cycle(models), count)]


def _question(model: str, draw: random.Random) -> Question:
    left, right = draw.randrange(10, 100), draw.randrange(10, 100)
    if model == ADDER:
        return Question(model, f"{left}+{right}=", str(left + right))
    return Question(model, f"{left}-{right}=", str(left - right))
