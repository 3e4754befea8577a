"""Shared by the parts of `cold_start.py`: models, questions and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from worker.models import ModelSpec, read_models

MODELS: Final = Path(__file__).parents[1] / "models.toml"
#: Timeout of every wait.
TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Task:
    """A model, with a question and its answer."""

    model: ModelSpec
    prompt: str
    answer: str

    def check(self, part: str, said: str) -> None:
        """Raise `WrongAnswer` if ``said`` is not the answer."""
        if said != self.answer:
            raise WrongAnswer(f"{part}: {self.prompt} was answered {said!r}, not {self.answer!r}")


class WrongAnswer(click.ClickException):
    """A wrong answer, which makes the figures worthless and ends the benchmark."""


#: Questions and answers by model.
_QUESTIONS: Final = {
    "adder": ("12+34=", "46"),
    "subtractor": ("58-21=", "37"),
    "llama": ("w5 w6 w7", " w8 w9 w10 w11 w12 w13"),
    "llama-again": ("w50 w51", " w52 w53 w54 w55 w56 w57"),
}


def tasks(models: Path = MODELS) -> tuple[Task, Task]:
    """The two tasks of a models file: the timed one, and the one that precedes it."""
    first, other = (Task(spec, *_QUESTIONS[name]) for name, spec in read_models(models).items())
    return first, other


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds to the first token, in all and by known phase."""

    seconds: float
    phases_s: Mapping[str, float]

    def with_rest(self, name: str) -> Timed:
        """Add the time outside all phases as one more phase."""
        rest = self.seconds - sum(self.phases_s.values())
        return Timed(self.seconds, {**self.phases_s, name: rest})


def phases(began: float, ends: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, from the times at which successive phases ended."""
    phases_s = {}
    for phase, end in ends.items():
        phases_s[phase] = end - began
        began = end
    return phases_s
