"""`tokenyard bench`: how much a live yard serves, and how soon."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tokenyard.cli.bench.load import Generator, Load
from tokenyard.cli.bench.measures import Sample
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import HarmlessConsole, say
from tokenyard.process.interrupted import SIGNALLED
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.keys import PRIORITY_CLASSES

ABOUT: Final = """Put a load on the live yard and measure it, by the words of `vllm bench serve`.

Prompts are random tokens; each request is a real one, and others wait behind it. With --rate,
requests begin at random moments (a Poisson process), so many in a second on the average; without,
as soon as --concurrency leaves room. Time to first token needs --stream. Interrupted, it cancels
what runs and prints what it has measured.

\b
Examples:
  tokenyard bench
  tokenyard bench --requests 2000 --concurrency 256 --stream
  tokenyard bench --rate 20 --requests 600 --prompt-tokens 512 --max-tokens 128 --stream --json

\b
Exit statuses:
  0  all requests completed        1  some failed
  2  wrong usage                   3  no broker or no coordinator
"""
_DEFAULT_CONCURRENCY: Final = 64


@click.command(cls=PlainCommand, help=ABOUT, short_help="Measure how much the yard serves.")
@click.option(
    "--requests", type=click.IntRange(1), default=200, show_default=True, help="How many in all."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests that begin in a second.  [default: as there is room]",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help=f"Most requests under way.  [default: {_DEFAULT_CONCURRENCY}; with --rate no bound]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Length of each prompt.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option("--ignore-eos", is_flag=True, help="Let each answer have just so many.")
@click.option("--model", default="", help="Which model.  [default: the yard's]")
@click.option("--stream", is_flag=True, help="Stream the answers, and measure the first token.")
@click.option(
    "--priority",
    type=click.Choice(PRIORITY_CLASSES),
    default="normal",
    show_default=True,
    help="Which intake they wait in.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Requests before, which are not measured.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and moments.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.001),
    default=120.0,
    show_default=True,
    help="Seconds without news after which a request counts as failed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, by vLLM's keys.")
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    rate: float | None,
    concurrency: int | None,
    ignore_eos: bool,
    stream: bool,
    timeout: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure, and print what came of it."""
    choice: YardChoice = ctx.obj
    load = Load(
        rate=rate or 0.0,
        concurrency=concurrency or (0 if rate else _DEFAULT_CONCURRENCY),
        streams=stream,
        ignores_eos=ignore_eos,
        timeout_s=timeout,
        **given,
    )
    with _shown(load.requests) as tell:
        generator = Generator(url_of(choice), choice.yard, load, tell)
        signalled = asyncio.run(_until_interrupted(generator))
    measured = generator.measured
    if as_json:
        asked = {"model": generator.model, "num_prompts": load.requests}
        pace = {"request_rate": rate or "inf", "max_concurrency": load.concurrency or None}
        say(msgspec.json.encode({**asked, **pace, **measured.as_dict()}))
    else:
        say(measured.as_text())
    ctx.exit(signalled or (Exit.FAILED if measured.errors else Exit.OK))


async def _until_interrupted(generator: Generator) -> int:
    """0 where it came to its end, else the exit status that stands for the signal.

    The signals are heeded here, not by `asyncio.run`, which leaves one alone that was ignored when
    the program began, as a shell does for what it runs in the background.
    """
    running = asyncio.ensure_future(generator.run())
    heard: list[int] = []

    def hear(number: int) -> None:
        heard.append(number)
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, hear, number)
    try:
        await running
    except asyncio.CancelledError:
        return SIGNALLED + heard[0]
    return 0


@contextmanager
def _shown(requests: int) -> Iterator[Callable[[Sample], None]]:
    """A bar in a terminal, on standard error."""
    console = HarmlessConsole(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("requests", total=requests)
        yield lambda _: bar.advance(task)
