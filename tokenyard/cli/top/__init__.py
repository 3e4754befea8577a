"""`tokenyard top`: a live view of a yard on the whole screen."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import click
from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

from tokenyard import clock
from tokenyard.broker.url import public_url
from tokenyard.cli.info import watch
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import plain_console
from tokenyard.cli.top.frame import frame
from tokenyard.process.interrupted import Interrupts
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.yard.history import Snapshot, SnapshotHistory

_FILE_WIDTH: Final = 120


@click.command(cls=PlainCommand, short_help="Show a live view of a yard.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two snapshots.",
)
@click.option("--once", is_flag=True, help="Print one picture, after two snapshots.")
@click.pass_context
def top(ctx: click.Context, interval: float, once: bool) -> None:
    """Show a live view of a yard on the whole screen.

    Waiting requests of each intake with their age and history; the tenants that wait, with the
    share of tokens that each should have, and that it had over the last minute; the workers with
    state, run state, lane (of its limit), tokens per second, time to the first token and memory;
    the models; and the last errors: dead letters, crashed workers, models that could not be loaded.
    If the broker becomes unreachable, it waits for it. The key q or Ctrl-C ends it.

    Examples:
      tokenyard top
      tokenyard top --interval 5
      tokenyard top --once                   one picture, for example to a file

    The exit status of --once is 3 if no coordinator leads, or the broker takes no writes.
    """
    console = plain_console()
    if once:
        ctx.exit(_print_once(ctx.obj, console, interval))
    if not console.is_terminal:
        raise click.UsageError(
            "this is not a terminal: give --once, or use `tokenyard info --interval`"
        )
    _run(ctx.obj, console, interval)


def _print_once(choice: YardChoice, console: Console, interval_s: float) -> Exit:
    """Print one picture, from two snapshots, because rates need two."""
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    pause = partial(clock.sleep, interval_s)
    paper = ConsoleDimensions(console.width, 0)
    [*_, (picture, is_open)] = _pictures(choice, lambda: paper, pause, count=2)
    console.print(picture)
    return Exit.OK if is_open else Exit.UNAVAILABLE


def _run(choice: YardChoice, console: Console, interval_s: float) -> None:
    """Until a key or a signal ends it."""
    live: Live | None = None
    with (
        contextlib.suppress(KeyboardInterrupt),
        Interrupts(),
        _single_keys(),
        contextlib.ExitStack() as screen,
    ):
        for picture, _ in _pictures(
            choice,
            lambda: console.size,
            lambda: _wait_for_key(interval_s).lower() == "q",
        ):
            # Not earlier, because an error of the first snapshot belongs on the usual screen.
            live = live or screen.enter_context(
                Live(console=console, screen=True, auto_refresh=False)
            )
            live.update(picture, refresh=True)


def _pictures(
    choice: YardChoice,
    paper: Callable[[], ConsoleDimensions],
    pause: Callable[[], object],
    count: int = 0,
) -> Iterator[tuple[RenderableType, bool]]:
    """A picture after each snapshot, and whether the yard is open, as far as is known."""
    url, history = url_of(choice), SnapshotHistory()
    place, seen_at = f"yard {choice.yard} at {public_url(url)}", clock.monotonic()
    for seen in watch(url, choice.yard, pause, count):
        error = ""
        if isinstance(seen, Snapshot):
            history.add(seen)
            seen_at = clock.monotonic()
        else:
            error = f"Last seen {clock.monotonic() - seen_at:.0f} s ago, trying again: {seen}"
        is_open = isinstance(seen, Snapshot) and seen.view.is_open
        yield frame(history, place, paper(), error), is_open


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """The terminal hands on each key at once, without Enter."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_for_key(seconds: float) -> str:
    """The key pressed within this time, or ""; without a terminal there is none."""
    if not sys.stdin.isatty():
        clock.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""
