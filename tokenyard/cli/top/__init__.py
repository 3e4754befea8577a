"""`tokenyard top`: a live view of a yard on the whole screen."""

from __future__ import annotations

import contextlib
from typing import Final

import click
from rich.console import Console, RenderableType
from rich.live import Live

from tokenyard import clock
from tokenyard.broker.url import public_url
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import plain_console
from tokenyard.cli.shared.interrupts import Interrupts
from tokenyard.cli.shared.watching import Keyboard, watch
from tokenyard.cli.top.frame import Paper, frame
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.yard.history import Snapshot, SnapshotHistory

ABOUT: Final = """Show a live view of a yard on the whole screen.

Waiting requests of each intake with their age and history; the tenants that wait, with the share of
tokens that each should have, and that it had over the last minute; the workers with state, run
state, lane (of its limit), tokens per second, time to the first token and memory; the models; and
the last errors: dead letters, crashed workers, models that could not be loaded. If the broker
becomes unreachable, it waits for it. The key q or Ctrl-C ends it.

\b
Examples:
  tokenyard top
  tokenyard top --interval 5
  tokenyard top --once                   one picture, for example to a file

The exit status of --once is 3 if no coordinator leads, or the broker takes no writes.
"""
_FILE_WIDTH: Final = 120


@click.command(cls=PlainCommand, help=ABOUT, short_help="Show a live view of a yard.")
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
    """Show snapshots until it is ended."""
    choice: YardChoice = ctx.obj
    console = plain_console()
    if once:
        ctx.exit(_print_once(choice, console, interval))
    if not console.is_terminal:
        raise click.UsageError(
            "this is not a terminal: give --once, or use `tokenyard info --interval`"
        )
    _run(choice, console, interval)


def _print_once(choice: YardChoice, console: Console, interval_s: float) -> Exit:
    """Print one picture, from two snapshots, because rates need two."""

    def pause() -> bool:
        clock.sleep(interval_s)
        return True

    url, picture = url_of(choice), _Picture(choice, console)
    for seen in watch(url, choice.yard, pause, count=2):
        picture.take(seen)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(picture.draw(height=0))
    return Exit.OK if picture.is_open else Exit.UNAVAILABLE


def _run(choice: YardChoice, console: Console, interval_s: float) -> None:
    """Until a key or a signal ends it."""
    url, picture, live = url_of(choice), _Picture(choice, console), None
    with (
        contextlib.suppress(KeyboardInterrupt),
        Interrupts(),
        Keyboard() as keyboard,
        contextlib.ExitStack() as screen,
    ):
        for seen in watch(url, choice.yard, lambda: keyboard.wait(interval_s).lower() != "q"):
            picture.take(seen)
            # Not earlier, because an error of the first snapshot belongs on the usual screen.
            live = live or screen.enter_context(
                Live(console=console, screen=True, auto_refresh=False)
            )
            live.update(picture.draw(console.height), refresh=True)


class _Picture:
    """The snapshots so far, and the present error."""

    def __init__(self, choice: YardChoice, console: Console) -> None:
        self._place = f"yard {choice.yard} at {public_url(url_of(choice))}"
        self._console = console
        self._history = SnapshotHistory()
        self._error = ""
        self._seen_at = clock.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether a coordinator leads and the broker takes requests, as far as is known."""
        return bool(not self._error and self._history.last and self._history.last.view.is_open)

    def take(self, seen: Snapshot | BrokerUnavailable) -> None:
        """Add the next snapshot, or the error in its place."""
        if isinstance(seen, Snapshot):
            self._history.add(seen)
            self._error, self._seen_at = "", clock.monotonic()
        else:
            away_s = clock.monotonic() - self._seen_at
            self._error = f"Last seen {away_s:.0f} s ago, trying again: {seen}"

    def draw(self, height: int) -> RenderableType:
        """Draw for a screen of this height; 0: no limit."""
        paper = Paper(self._console.width, height)
        return frame(self._history, self._place, paper, self._error)
