"""The load of every peer and its timing; needs only the standard library.

Each peer's module runs in its own interpreter: `worker URL` serves until it is stopped, `client URL
REQUESTS RATE` prints one JSON object. Its job takes 128 packed tokens and returns 32.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import struct
import time
from collections.abc import Awaitable, Callable, Sequence

PROMPT_TOKENS = 128
RESULT_TOKENS = 32
PROMPTS = 64
#: Longest wait for one answer.
WAIT_S = 60.0
WARM = 20  # answers before timing starts


def prompts() -> list[bytes]:
    """Distinct prompts, the same in each process."""
    draw = random.Random(128)
    return [
        struct.pack(f"<{PROMPT_TOKENS}i", *(draw.randrange(32_000) for _ in range(PROMPT_TOKENS)))
        for _ in range(PROMPTS)
    ]


def answer(prompt: bytes) -> bytes:
    """A worker's answer to a prompt: its last tokens."""
    return prompt[-4 * RESULT_TOKENS :]


def payloads(requests: int) -> list[bytes]:
    """The prompts of a run, in order."""
    different = prompts()
    return [different[at % PROMPTS] for at in range(requests)]


def check(asked: Sequence[bytes], answers: Sequence[bytes]) -> None:
    """Check every answer; exits if one is wrong."""
    wrong = sum(answer(prompt) != bytes(got) for prompt, got in zip(asked, answers, strict=True))
    if wrong:
        raise SystemExit(f"{wrong} of {len(asked)} answers are wrong")


def report(per_s: float, times_s: Sequence[float]) -> None:
    """Print the figures."""
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    figures = {"requests_per_s": per_s, "p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000}
    print(json.dumps(figures), flush=True)


def measure(requests: int, rate: float, ask: Callable[[Sequence[bytes]], Sequence[bytes]]) -> None:
    """Time ``ask``, which returns answers in the order of the prompts: all together, and paced."""

    async def answers(prompts: Sequence[bytes]) -> Sequence[bytes]:
        return ask(prompts)

    asyncio.run(measure_async(requests, rate, answers))


async def measure_async(
    requests: int, rate: float, ask: Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]
) -> None:
    """`measure` for an asynchronous client."""
    check(payloads(WARM), await ask(payloads(WARM)))
    asked = payloads(requests)
    began = time.perf_counter()
    answers = await ask(asked)
    per_s = requests / (time.perf_counter() - began)
    check(asked, answers)
    times = []
    start = time.perf_counter()
    for number, prompt in enumerate(payloads(paced(requests))):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        check([prompt], await ask([prompt]))
        times.append(time.perf_counter() - due)
    report(per_s, times)


def paced(requests: int) -> int:
    """Number of requests sent one at a time."""
    return max(20, min(200, requests // 10))
