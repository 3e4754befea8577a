"""`tokenyard bench`: measure throughput and latency of a live yard."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tokenyard.cli.bench.load import BenchLoad, LoadGenerator
from tokenyard.cli.bench.measures import Sample
from tokenyard.cli.shared.completion import complete_model
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import HarmlessConsole, say
from tokenyard.process.interrupted import SIGNALLED
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.keys import PRIORITY_CLASSES

ABOUT: Final = """Put a load on the live yard and measure it, in the terms of `vllm bench serve`.

Prompts are random tokens; the requests are real, and delay others. With --rate, requests start at
random times (a Poisson process) with this average rate; without it, as soon as --concurrency
allows. Time to first token needs --stream. An interrupt cancels the running requests and prints the
measurements so far.

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


@click.command(cls=PlainCommand, help=ABOUT, short_help="Measure throughput and latency.")
@click.option(
    "--requests", type=click.IntRange(1), default=200, show_default=True, help="Number of requests."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Average requests per second.  [default: as --concurrency allows]",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help=f"Most requests in flight.  [default: {_DEFAULT_CONCURRENCY}; with --rate no limit]",
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
@click.option("--ignore-eos", is_flag=True, help="Generate exactly --max-tokens for each answer.")
@click.option(
    "--model", default="", shell_complete=complete_model, help="The model.  [default: the yard's]"
)
@click.option("--stream", is_flag=True, help="Stream the answers, and measure the first token.")
@click.option(
    "--class",
    "priority",
    type=click.Choice(PRIORITY_CLASSES),
    default="normal",
    show_default=True,
    help="The priority class of the requests.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Requests before the measurement.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of prompts and start times."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.001),
    default=120.0,
    show_default=True,
    help="Seconds without progress after which a request fails.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with vLLM's keys.")
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
    """Measure, and print the result."""
    choice: YardChoice = ctx.obj
    load = BenchLoad(
        rate=rate or 0.0,
        concurrency=concurrency or (0 if rate else _DEFAULT_CONCURRENCY),
        streams=stream,
        ignores_eos=ignore_eos,
        timeout_s=timeout,
        **given,
    )
    with _shown(load.requests) as tell:
        generator = LoadGenerator(url_of(choice), choice.yard, load, tell)
        signalled = asyncio.run(_until_interrupted(generator))
    measured = generator.measured
    if as_json:
        about = {"model": generator.model, "num_prompts": load.requests}
        pace = {"request_rate": rate or "inf", "max_concurrency": load.concurrency or None}
        say(msgspec.json.encode({**about, **pace, **measured.as_dict()}))
    else:
        say(measured.as_text())
    ctx.exit(signalled or (Exit.FAILED if measured.errors else Exit.OK))


async def _until_interrupted(generator: LoadGenerator) -> int:
    """0, or the exit status of the signal that interrupted it.

    The signals are handled here, because `asyncio.run` leaves a signal ignored that was ignored at
    the start, as in a background job of a shell.
    """
    running = asyncio.ensure_future(generator.run())
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        await running
    except asyncio.CancelledError:
        return SIGNALLED + received[0]
    return 0


@contextmanager
def _shown(requests: int) -> Iterator[Callable[[Sample], None]]:
    """A progress bar on standard error, in a terminal."""
    console = HarmlessConsole(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("requests", total=requests)
        yield lambda _: bar.advance(task)
