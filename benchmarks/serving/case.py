"""Shared by the parts of `serving.py`: tasks, loads and outcomes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from benchmarks.llama import Shape
from worker.models import ModelSpec

#: Timeout of every wait.
TIMEOUT_S: Final = 300.0
#: Sizes of the long workload.
PROMPT_TOKENS: Final = 512
ANSWER_TOKENS: Final = 128
_SHOWN_FAULTS: Final = 3
#: Fewest requests of a load at an offered rate.
LEAST_PACED: Final = 8
_SEED: Final = 6


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, its only right answer, and the answer's number of tokens; text or token ids."""

    prompt: str | list[int]
    answer: str | list[int]
    tokens: int

    @property
    def is_text(self) -> bool:
        """Whether the answer is text."""
        return isinstance(self.answer, str)

    @classmethod
    def counting(cls, shape: Shape, count: int) -> list[Self]:
        """Tasks of the long workload, for a model of this shape."""
        return [
            cls(prompt, shape.answer(prompt[-1], ANSWER_TOKENS), ANSWER_TOKENS)
            for prompt in shape.prompts(count, PROMPT_TOKENS)
        ]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its sampling: greedy, so that a prompt has one right answer."""

    name: str
    title: str
    model: ModelSpec
    max_tokens: int
    ignores_eos: bool

    def sampling(self) -> dict[str, Any]:
        """Sampling parameters by the names that all sides use."""
        return {
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignores_eos,
        }


def long_workload(name: str, model: ModelSpec) -> Workload:
    """Long prompts and answers of one length."""
    title = f"{PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out"
    return Workload(name, title, model, ANSWER_TOKENS, True)


@dataclass(frozen=True, slots=True)
class Load:
    """One request per task, all together, or at the times in ``arrivals_s``."""

    tasks: Sequence[Task]
    streams: bool = False
    arrivals_s: Sequence[float] = ()  # seconds from the start

    @classmethod
    def of(
        cls,
        tasks: Sequence[Task],
        requests: int,
        *,
        streams: bool,
        arrivals_s: Sequence[float] = (),
    ) -> Self:
        """Make a load of ``requests`` requests, with the tasks in turn."""
        return cls(list(itertools.islice(itertools.cycle(tasks), requests)), streams, arrivals_s)

    @classmethod
    def paced(cls, tasks: Sequence[Task], rate: float, seconds: float) -> Self:
        """Streams that begin at random times, which are the same for all sides."""
        requests = max(LEAST_PACED, round(rate * seconds))
        arrivals_s = poisson(requests, rate, _SEED)
        return cls.of(tasks, requests, streams=True, arrivals_s=arrivals_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a load, timed by the client."""

    seconds: float  # from the first request to the last answer
    tokens: int
    requests: int
    faults: Sequence[str] = ()  # wrong answers in words
    ttft_ms: Sequence[float] = ()
    itl_ms: Sequence[float] = ()
    cpu_s: float = 0.0  # of all processes of the side, including the client's
    broker_cpu_s: float = 0.0  # the broker's part of it, if there is a broker

    @property
    def cpu_us_per_token(self) -> float:
        """CPU time per token in µs, which does not depend on the machine's other load."""
        return 1e6 * self.cpu_s / self.tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answers per second."""
        return self.tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Answers per second."""
        return self.requests / self.seconds


@dataclass(slots=True)
class Stream:
    """The pieces of one answer, and their times."""

    began: float
    pieces: list[str | list[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def note(self, piece: str | list[int], now: float) -> None:
        """Record a piece."""
        if piece:
            self.pieces.append(piece)
            self.times.append(now)

    def answer(self, task: Task) -> str | list[int]:
        """The joined pieces."""
        if task.is_text:
            return "".join(piece for piece in self.pieces if isinstance(piece, str))
        return [token for piece in self.pieces if not isinstance(piece, str) for token in piece]

    def gaps_ms(self) -> list[float]:
        """Milliseconds from token to token; 0 between tokens of one piece."""
        gaps: list[float] = []
        for at, piece in enumerate(self.pieces):
            if at:
                gaps.append(1000 * (self.times[at] - self.times[at - 1]))
            gaps += [0.0] * (len(piece) - 1)
        return gaps


def outcome(tasks: Sequence[Task], streams: Sequence[Stream], seconds: float) -> Outcome:
    """Check all answers and collect the times."""
    answers = [stream.answer(task) for task, stream in zip(tasks, streams, strict=True)]
    return Outcome(
        seconds,
        sum(task.tokens for task in tasks),
        len(tasks),
        faults(tasks, answers),
        [1000 * (one.times[0] - one.began) for one in streams if one.times],
        [gap for one in streams for gap in one.gaps_ms()],
    )


def faults(tasks: Sequence[Task], answers: Sequence[str | list[int]]) -> list[str]:
    """Describe wrong answers: their number, and the first."""
    wrong = [
        f"{_short(task.prompt)} was answered {_short(answer)}, not {_short(task.answer)}"
        for task, answer in zip(tasks, answers, strict=True)
        if answer != task.answer
    ]
    return [f"{len(wrong)} wrong", *wrong[:_SHOWN_FAULTS]] if wrong else []


def _short(said: str | list[int]) -> str:
    shown = repr(said)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def poisson(requests: int, rate: float, seed: int) -> list[float]:
    """Random arrival times (Poisson) in seconds, determined by the seed."""
    draw = random.Random(seed)
    gaps = (draw.expovariate(rate) for _ in range(requests))
    return list(itertools.accumulate(gaps))


def engine_arguments(model: ModelSpec) -> Mapping[str, Any]:
    """The settings of a model as vLLM's arguments."""
    cache: dict[str, Any] = {}
    if model.kv_cache_gib:
        cache["kv_cache_memory_bytes"] = int(model.kv_cache_gib * 1024**3)
    return {
        "model": model.path,
        "served_model_name": model.name,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "enforce_eager": model.enforce_eager,
        **cache,
        **model.engine_args,
    }
