"""Many streams at the same time on one gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop

from benchmarks.cold_start.case import WrongAnswer
from benchmarks.gateway.client import Question, as_text
from benchmarks.serving.case import TIMEOUT_S, Task, Workload


@dataclass(frozen=True, slots=True)
class Held:
    """A load of open streams."""

    streams: int
    peak: int  # most streams between head and end at one moment
    seconds: float


def hold_open(url: str, workload: Workload, tasks: Sequence[Task]) -> Held:
    """Open a stream for each task, and read all; raises `WrongAnswer`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Holder(url, workload).run(tasks))


class _Holder:
    """Counts the streams that are open."""

    def __init__(self, url: str, workload: Workload) -> None:
        self._url = f"{url}/v1/completions"
        self._workload = workload
        self._open = 0
        self._peak = 0

    async def run(self, tasks: Sequence[Task]) -> Held:
        """Ask for everything at once."""
        began = time.perf_counter()
        connector = aiohttp.TCPConnector(limit=0)
        patience = aiohttp.ClientTimeout(TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
            found = await asyncio.gather(*(self._read(session, task) for task in tasks))
        wrong = [fault for fault in found if fault]
        if wrong or not found:
            raise WrongAnswer(f"{len(wrong)} of {len(found)} streams: " + "\n".join(wrong[:3]))
        return Held(len(found), self._peak, time.perf_counter() - began)

    async def _read(self, session: aiohttp.ClientSession, task: Task) -> str:
        """Read one stream to its end; what is wrong with it, or nothing."""
        asked = Question.of(task)
        body = {
            **self._workload.sampling(),
            "model": self._workload.model.name,
            "prompt": asked.prompt,
            "stream": True,
            "return_token_ids": True,
        }
        said: list[str] = []
        tokens: list[int] = []
        async with session.post(self._url, json=body) as response:
            if not response.ok:
                return f"{response.status}: {await response.text()}"
            self._open += 1
            self._peak = max(self._peak, self._open)
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = _choice(line)
                    said.append(choice["text"])
                    tokens += choice["token_ids"] or ()
                elif line.startswith(b"data: [DONE]"):
                    self._open -= 1
                    break
            else:
                return f"{as_text(task.prompt)[-40:]!r}: cut behind {len(tokens)} tokens"
        text = "".join(said).strip()
        is_right = text == asked.answer and len(tokens) == task.tokens
        return (
            "" if is_right else f"{text[:60]!r} of {len(tokens)} tokens, not {asked.answer[:60]!r}"
        )


def _choice(line: bytes) -> Any:
    event = json.loads(line.removeprefix(b"data: "))
    if "choices" not in event:
        raise WrongAnswer(line.decode(errors="replace"))
    return event["choices"][0]
