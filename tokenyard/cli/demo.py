"""`tokenyard demo`: a whole yard on this machine, with answers that are checked."""

from __future__ import annotations

import contextlib
import http.client
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tokenyard.cli.shared.console import HarmlessConsole, say
from tokenyard.cli.up import engine_options
from tokenyard.cli.up.child import LogLine
from tokenyard.cli.up.local_yard import LocalPlan, LocalYard, YardFailed
from tokenyard.cli.up.progress import choose_http_port, spinner
from tokenyard.client.sync import Client
from tokenyard.process.extras import installed_vllm, why_no_gateway
from tokenyard.process.interrupted import Interrupts
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.errors import RequestFailed
from tokenyard.protocol.replies import Result
from tokenyard.protocol.settings import EngineName
from tokenyard.protocol.texts import counted, pip_install

_STREAMED: Final = 3
_SEED: Final = 2
#: "99+99=" has three digits in its answer, and an end.
_MAX_TOKENS: Final = 8
_TIMEOUT_S: Final = 120.0
_GRACE_S: Final = 5.0
_INVENTED: Final = (
    "vLLM is not installed, so a simulated engine invents the answers, and there is no gateway; for"
    " real ones"
)


@dataclass(frozen=True, slots=True)
class Sum:
    """A question with its correct answer."""

    prompt: str
    answer: str | None  # None where the engine invents it


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """The answer to a sum."""

    question: Sum
    result: Result

    @property
    def text(self) -> str:
        """The answer, or the error."""
        if not self.result.ok:
            error = self.result.error
            return f"{self.result.status}: {error.message if error else ''}"
        return (self.result.text or "").strip()

    @property
    def is_correct(self) -> bool:
        """Whether the sum is correct, as far as one is wanted."""
        return self.result.ok and self.question.answer in {None, self.text}


def sums(count: int) -> list[Sum]:
    """Sums of two-digit numbers, the same in each run."""
    numbers = random.Random(_SEED)
    pairs = [(numbers.randint(10, 99), numbers.randint(10, 99)) for _ in range(count)]
    return [Sum(f"{left}+{right}=", str(left + right)) for left, right in pairs]


@click.command(
    cls=PlainCommand,
    short_help="Ask two workers 200 sums, checked.",
    params=engine_options.worker_options("Worker processes.", engine_options.DEVICE_TEXTS),
)
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True, help="Sums.")
@click.option(
    "--rows",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Correct answers in the table; wrong ones are always shown.",
)
@click.pass_context
def demo(ctx: click.Context, /, requests: int, rows: int, **given: Any) -> None:
    """Ask two vLLM workers on this machine 200 sums, and check the answers.

    Starts a broker in a temporary folder, a coordinator, the workers, which serve the example model
    `adder`, and a gateway; streams a few answers, sends the rest, asks a few by HTTP, prints a
    table, and stops everything. It needs neither Redis nor a GPU; with one GPU it starts one
    worker. Where vLLM is not installed, a simulated engine invents the answers, and there is no
    gateway.

    Examples:
      tokenyard demo
      tokenyard demo --requests 2000 --workers 1 --rows 0
    """
    choice: YardChoice = ctx.obj
    console = HarmlessConsole(highlight=False, markup=False)
    model = engine_options.example_model("adder")
    engine: EngineName = "vllm" if installed_vllm() else "simulated"
    worker, used = engine_options.worker_settings(
        engine=engine, model=str(model), name="demo", grace_s=_GRACE_S, **given
    )
    why_none = why_no_gateway()
    if engine == "simulated":
        console.print(f"{_INVENTED}: {pip_install('worker-cpu')}, or [worker].", soft_wrap=True)
    elif why_none:
        console.print(f"No gateway: {why_none}.", soft_wrap=True)
    questions = sums(requests)
    if engine == "simulated":
        questions = [replace(one, answer=None) for one in questions]
    with _folder() as folder:
        plan = LocalPlan(
            yard="demo",
            redis_url="",
            data_dir=folder,
            worker=worker,
            enforce_eager=True,
            http_port=0 if why_none else choose_http_port(0),
            has_gateway=not why_none,
            debug=choice.debug,
        )
        answers = _run(plan, console, used, questions)
        console.print(_table(answers, rows))
        console.print(f"(--rows {requests} shows all correct answers)\n" if rows < requests else "")
    answered = sum(answer.result.ok for answer in answers)
    correct = sum(answer.is_correct for answer in answers)
    say(f"{answered} answered, {'all invented' if engine == 'simulated' else f'{correct} correct'}")
    ctx.exit(Exit.OK if correct == requests else Exit.FAILED)


demo.reads = ("coordinator", "worker", "gateway")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the yard; it is kept if the yard fails, because the error names its logs."""
    folder = Path(tempfile.mkdtemp(prefix="tokenyard-demo-"))
    try:
        yield folder
    except YardFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _run(
    plan: LocalPlan, console: Console, used: str, questions: Sequence[Sum]
) -> list[DemoAnswer]:
    """Start a yard on the ``used`` devices, send all questions, stop it."""

    def say(name: str, line: LogLine) -> None:
        if line.is_serious or plan.debug:
            console.print(f"{name}: {line.text}", style="yellow")

    yard = LocalYard(plan, say)
    with Interrupts() as interrupts:
        try:
            _start(yard, plan, console, used)
            with Client(yard.url, yard=plan.yard) as client:
                streamed = _stream(client, console, questions[:_STREAMED])
                answers = streamed + _ask(client, console, questions[_STREAMED:])
            if plan.has_gateway:
                _ask_by_http(yard.http_url, plan, console, questions[:_STREAMED])
            return answers
        except KeyboardInterrupt:
            raise click.Abort from None
        finally:
            interrupts.hold()
            with console.status("Stopping workers, coordinator and broker"):
                yard.stop(lambda: interrupts.is_hurried)
            console.print("Everything is stopped.\n")


def _start(yard: LocalYard, plan: LocalPlan, console: Console, used: str) -> None:
    gateway = ", a gateway" if plan.has_gateway else ""
    slots = plan.worker.slots
    if plan.worker.engine == "simulated":
        workers = counted(slots, "simulated worker") + "."
    else:
        workers = f"{counted(slots, 'vLLM worker')} on {used}."
        workers += "\nTheir engines need about half a minute to start."
    console.print(f"Starting a broker, a coordinator{gateway} and {workers}")
    with spinner(console, slots) as tell:
        for warning in yard.start():
            console.print(f"Warning: {warning}", style="yellow")
        yard.wait_ready(tell)


def _stream(client: Client, console: Console, questions: Sequence[Sum]) -> list[DemoAnswer]:
    console.print("\nA few answers, token by token:")
    answers = []
    for question in questions:
        handle = client.submit(
            question.prompt, max_tokens=_MAX_TOKENS, temperature=0.0, stream=True
        )
        console.print(f"  {question.prompt}", end="")
        with contextlib.suppress(RequestFailed):  # the result has the error
            for delta in handle:
                console.print(f" {delta.text or ''}", end="")
        console.print()
        answers.append(DemoAnswer(question, handle.wait(_TIMEOUT_S)))
    return answers


def _ask(client: Client, console: Console, questions: Sequence[Sum]) -> list[DemoAnswer]:
    console.print(f"\n{len(questions)} more at once:")
    results: dict[int, Result] = {}
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("answers", total=len(questions))
        prompts = (question.prompt for question in questions)
        for index, result in client.map(prompts, max_tokens=_MAX_TOKENS, temperature=0.0):
            results[index] = result
            progress.advance(task)
    return [DemoAnswer(question, results[at]) for at, question in enumerate(questions)]


def _ask_by_http(
    url: str | None, plan: LocalPlan, console: Console, questions: Sequence[Sum]
) -> None:
    """Ask the gateway as an OpenAI client does; raises `YardFailed` for a wrong answer."""
    if url is None:
        raise YardFailed("the gateway is off")
    console.print(f"\nBy OpenAI's API, POST {url}/completions:")
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.netloc, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        for question in questions:
            body: dict[str, object] = {"prompt": question.prompt}
            body |= {"model": plan.worker.serves, "max_tokens": _MAX_TOKENS, "temperature": 0}
            headers = {"Content-Type": "application/json"}
            connection.request(
                "POST", f"{place.path}/completions", msgspec.json.encode(body), headers
            )
            answer = connection.getresponse().read()
            try:
                text = msgspec.json.decode(answer)["choices"][0]["text"]
            except (msgspec.DecodeError, LookupError, TypeError) as error:
                raise YardFailed(f"the gateway answered {answer!r}") from error
            console.print(f"  {question.prompt} {text}")
            if text != question.answer:
                raise YardFailed(f"the gateway answered {text!r} to {question.prompt!r}")


def _table(answers: Sequence[DemoAnswer], rows: int) -> Table:
    """Wrong answers first, then ``rows`` correct ones."""
    wrong = [answer for answer in answers if not answer.is_correct]
    right = [answer for answer in answers if answer.is_correct]
    table = Table("Prompt", "Answer", "Worker", title="What came back")
    table.add_column("Time", justify="right")
    for answer in wrong + right[:rows]:
        timing, provenance = answer.result.timing, answer.result.provenance
        worker, took = provenance.worker if provenance else "-", "-"
        if timing and timing.engine_ms is not None:
            took = f"{timing.queue_ms + timing.engine_ms:.0f} ms"
        style = None if answer.is_correct else "red"
        table.add_row(answer.question.prompt, answer.text, worker, took, style=style)
    return table
