"""Who asks in `benchmarks.fairness`, how often, and for what: heavy-tailed, with known answers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.simulated import simulated_answer
from tokenyard.protocol.wire import Request, SamplingParams, pack_tokens

VOCABULARY: Final = 32_000
#: What each request may generate. It says nothing of its answer's length, as with most callers.
MAX_TOKENS: Final = 512
#: Weights of the tokens of a prompt and of an answer in the service that a tenant has had.
INPUT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
#: The tenant that floods.
FLOODING: Final = "flood"
#: Different requests of a tenant, asked in turn, so that policies are compared on the same ones.
_POOL: Final = 256
_MOST_IN: Final = 4_000
_MOST_OUT: Final = 256


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and its answer, which ends at a stop token."""

    prompt: list[int]
    answer: list[int]

    @property
    def service(self) -> float:
        """Its tokens, weighted as a tenant's service is."""
        return INPUT_WEIGHT * len(self.prompt) + OUTPUT_WEIGHT * len(self.answer)


@dataclass(frozen=True, slots=True)
class Mix:
    """Lognormal lengths of prompts and answers, in tokens."""

    prompt: int  # median
    prompt_sigma: float
    answer: int
    answer_sigma: float


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks for these in turn, at a fixed rate."""

    name: str
    weight: float
    rate: float  # requests per second
    asks: Sequence[Ask]
    at_s: float = 0.0  # of its first request
    is_light: bool = False  # it streams, so that the time of its first token is known


#: What those ask who ask once a second.
LIGHT: Final = Mix(50, 1.0, 8, 0.8)
#: A conversation; a long document and a short answer; a short question and a long answer.
CHAT: Final = Mix(200, 1.0, 24, 0.8)
DOCUMENTS: Final = Mix(600, 0.8, 8, 0.8)
WRITING: Final = Mix(60, 0.8, 48, 0.6)

#: Weights of the tenants of a flood, in turn.
_WEIGHTS: Final = (1.0, 2.0, 4.0)


def asks(mix: Mix, seed: int, count: int = _POOL) -> list[Ask]:
    """Requests of these lengths, the same for each seed."""
    draw = random.Random(seed)
    return [_ask(mix, draw) for _ in range(count)]


def _ask(mix: Mix, draw: random.Random) -> Ask:
    prompt_tokens = _lognormal(draw, mix.prompt, mix.prompt_sigma, _MOST_IN)
    answer_tokens = _lognormal(draw, mix.answer, mix.answer_sigma, _MOST_OUT)
    prompt = [draw.randrange(VOCABULARY) for _ in range(prompt_tokens)]
    answer = answer_to(prompt, answer_tokens)
    return Ask(prompt, answer[: answer.index(answer[-1]) + 1])


def _lognormal(draw: random.Random, median: int, sigma: float, most: int) -> int:
    return min(most, max(1, round(median * draw.lognormvariate(0.0, sigma))))


def answer_to(prompt: list[int], count: int) -> list[int]:
    """The simulated engine's answer."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    request = Request(id="x", tokens=pack_tokens(prompt), params=params)
    return simulated_answer(request, max_model_len=8_192).tokens


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed model of each worker, and their number."""

    workers: int
    max_num_seqs: int
    prefill_rate: float  # prompt tokens per second
    step_s: float

    def device_s(self, some: Sequence[Ask]) -> float:
        """Mean time of one worker that a request takes in a full batch."""
        prompt = statistics.fmean(len(one.prompt) for one in some)
        answer = statistics.fmean(len(one.answer) for one in some)
        return prompt / self.prefill_rate + answer * self.step_s / self.max_num_seqs

    def capacity(self, some: Sequence[Ask]) -> float:
        """How many such requests all workers finish in a second."""
        return self.workers / self.device_s(some)


def light_tenants(count: int, seed: int) -> list[Tenant]:
    """Tenants that ask once a second, each at its own moment."""
    draw = random.Random(seed)
    pool = asks(LIGHT, seed)
    return [
        Tenant(
            f"light-{number}",
            _WEIGHTS[number % len(_WEIGHTS)],
            rate=1.0,
            asks=draw.sample(pool, len(pool)),
            at_s=draw.random(),
            is_light=True,
        )
        for number in range(count)
    ]


def flooding_tenant(speed: Speed, times: float, seed: int) -> Tenant:
    """A tenant that asks for ``times`` the capacity; no weight is larger than its."""
    pool = asks(CHAT, seed)
    return Tenant(FLOODING, max(_WEIGHTS), times * speed.capacity(pool), pool)


def greedy_tenants(speed: Speed, times: float, seed: int) -> list[Tenant]:
    """Tenants of weights 1, 2 and 4, of different lengths, each asking for too much."""
    mixes = {"documents": DOCUMENTS, "chat": CHAT, "writing": WRITING}
    pools = {name: asks(mix, seed + at) for at, (name, mix) in enumerate(mixes.items())}
    return [
        Tenant(name, weight, times * speed.capacity(pool), pool)
        for weight, (name, pool) in zip(_WEIGHTS, pools.items(), strict=True)
    ]
