"""Drives an engine as a worker does, and records its outputs for each request."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.support.builders import make_assignment, make_request
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.replies import Choice
from tokenyard.protocol.wire import Assignment, SamplingParams
from worker.engines import Engine, Finished, RequestError, TokenDelta
from worker.models import ModelSpec

if TYPE_CHECKING:
    from worker.engines.vllm.core import Core
    from worker.engines.vllm.engine import VllmEngine

MODELS = Path(__file__).parents[2] / "examples" / "arithmetic" / "models"
PROMPT = [5, 6, 14, 7, 8, 16]  # "12+34=" to the adder
MAX_STEPS = 2_000
#: The time-out of a program that a test runs.
PROGRAM_S = 170.0


def spec_of(model: str, path: Path | None = None, **fields: Any) -> ModelSpec:
    """A small model that starts quickly: one of the examples, or the one at ``path``."""
    named = {
        "name": model,
        "path": str(path or MODELS / model),
        "dtype": "float32",
        "max_num_seqs": 16,
        "enforce_eager": True,
    }
    return ModelSpec(**named | fields)


@dataclass
class Outcome:
    """All outputs of an engine for one request."""

    deltas: list[TokenDelta] = field(default_factory=list)
    finished: Finished | None = None
    fault: RequestError | None = None

    @property
    def choice(self) -> Choice:
        """The first choice; fails the test if it did not finish."""
        assert self.finished is not None, self.fault
        return self.finished.choices[0]

    @property
    def tokens(self) -> list[int]:
        """Tokens of the first choice."""
        return list(self.choice.tokens)

    def streamed(self, index: int = 0) -> list[int]:
        """Tokens of all deltas of one choice."""
        return [token for delta in self.deltas if delta.index == index for token in delta.tokens]

    def streamed_text(self, index: int = 0) -> str:
        """Text of all deltas of one choice."""
        return "".join(delta.text or "" for delta in self.deltas if delta.index == index)


def ask(
    key: str = "1-0",
    *,
    tokens: Sequence[int] | None = None,
    prompt: str | None = None,
    messages: list[dict[str, Any]] | None = None,
    stream: bool = False,
    published: Sequence[int] = (),
    choices: bytes = b"",
    model: str = "",
    **params: Any,
) -> Assignment:
    """An assignment with these parameters; without a prompt it takes the common one."""
    if tokens is None and prompt is None and messages is None:
        tokens = PROMPT
    request = make_request(
        f"request-{key}",
        tokens=tokens,
        prompt=prompt,
        messages=messages,
        stream=stream,
        model=model,
        params=SamplingParams(**params),
    )
    return make_assignment(request, entry=key, published=published, choices=choices)


def greedy(key: str = "1-0", **fields: Any) -> Assignment:
    """Parameters for twelve greedy tokens, even if the model would end sooner."""
    return ask(key, **({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | fields))


def drain(engine: Engine, outcomes: dict[str, Outcome]) -> None:
    """Step until no request is left."""
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished:
            return
        for event in engine.step():
            outcome = outcomes.setdefault(event.key, Outcome())
            if isinstance(event, TokenDelta):
                assert outcome.finished is None, "a delta after the end"
                outcome.deltas.append(event)
            elif isinstance(event, Finished):
                assert outcome.finished is None, "finished twice"
                outcome.finished = event
            else:
                outcome.fault = event
    raise AssertionError(f"the engine did not end in {MAX_STEPS} steps")


def run(engine: Engine, *assignments: Assignment) -> list[Outcome]:
    """Run requests together; return their outcomes in order."""
    outcomes: dict[str, Outcome] = {}
    for assignment in assignments:
        engine.add(assignment)
    drain(engine, outcomes)
    return [outcomes[assignment.entry] for assignment in assignments]


def exit_status(target: Callable[..., None], *arguments: object) -> int | None:
    """How a new process ends that calls a function."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(120)
    return process.exitcode


def run_program(text: str, folder: Path, *arguments: str, cwd: Path | None = None) -> str:
    """The output of a program in a process of its own, which must succeed."""
    program = folder / "program.py"
    program.write_text(text)
    ended = subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=cwd or folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_S,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def refused_field(engine: Engine, assignment: Assignment) -> str:
    """The field for which an engine refuses a request, of which it keeps nothing."""
    with pytest.raises(InvalidRequest) as refused:
        engine.add(assignment)
    assert not engine.has_unfinished
    return refused.value.field


def answers(engine: Engine) -> list[list[int]]:
    """Greedy tokens for a few prompts with a common beginning."""
    prompts = [[4, 5, 14, 4 + at] for at in range(12)]
    asked = [greedy(f"{at}-0", tokens=tokens) for at, tokens in enumerate(prompts)]
    return [outcome.tokens for outcome in run(engine, *asked)]


def core_of(engine: Engine) -> Core:
    """The core of an engine in this process."""
    front: Any = engine
    core: Core = front._link._core
    return core


def without_cache(outcome: Outcome) -> Finished | None:
    """The end of a request without the tokens of the cache: only some calls look into it."""
    ended = outcome.finished
    return ended and msgspec.structs.replace(ended, cached_tokens=None, created_cache_tokens=None)


def counter_of_reuse(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that runs the same prompt of 50 tokens and returns how many were cached."""
    inner = engine._open()
    outputs: list[Any] = []
    step = inner.step
    monkeypatch.setattr(inner, "step", lambda: outputs.extend(made := step()) or made)

    def reused() -> int:
        run(engine, greedy(tokens=list(range(4, 14)) * 5, max_tokens=1))
        return int(outputs[-1].num_cached_tokens)

    return reused
