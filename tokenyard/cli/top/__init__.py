"""`tokenyard top`: a yard on the whole screen, live."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import click
from rich.console import Console, RenderableType
from rich.live import Live

from tokenyard.admin.history import Look, SnapshotHistory
from tokenyard.broker.connection import public_url
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import plain_console
from tokenyard.cli.shared.interrupts import Interrupts
from tokenyard.cli.shared.watching import Keyboard, watch
from tokenyard.cli.top.frame import Paper, frame
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.errors import BrokerUnavailable

ABOUT: Final = """Show a yard on the whole screen, and refresh it.

What waits in each intake, for how long and with its history; the workers with state, run state,
lane (of its limit), tokens a second, time to the first token and memory; the models; the last
errors: dead letters, deaths of workers, models that could not be loaded. A broker that goes away
meanwhile is waited for. The key q or Ctrl-C ends it.

\b
Examples:
  tokenyard top
  tokenyard top --interval 5
  tokenyard top --once                   one picture, also into a file

The exit status of --once is 3 where no coordinator leads, or the broker takes no writes.
"""
_FILE_WIDTH: Final = 120


@click.command(cls=PlainCommand, help=ABOUT, short_help="Show a yard live, on the whole screen.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Pause between two looks.",
)
@click.option("--once", is_flag=True, help="Print one picture, after two looks.")
@click.pass_context
def top(ctx: click.Context, interval: float, once: bool) -> None:
    """Look again and again."""
    choice: YardChoice = ctx.obj
    console = plain_console()
    if once:
        ctx.exit(_print_once(choice, console, interval))
    if not console.is_terminal:
        raise click.UsageError(
            "this is no terminal: give --once, or use `tokenyard info --interval`"
        )
    _run(choice, console, interval)


def _print_once(choice: YardChoice, console: Console, interval_s: float) -> Exit:
    """One picture; two looks, because rates lie between them."""

    def pause() -> bool:
        time.sleep(interval_s)
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
            # Not sooner: an error of the first look belongs on the usual screen.
            live = live or screen.enter_context(
                Live(console=console, screen=True, auto_refresh=False)
            )
            live.update(picture.draw(console.height), refresh=True)


class _Picture:
    """What was seen until now, and what is wrong now."""

    def __init__(self, choice: YardChoice, console: Console) -> None:
        self._place = f"yard {choice.yard} at {public_url(url_of(choice))}"
        self._console = console
        self._looks = SnapshotHistory()
        self._fault = ""
        self._seen_at = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether a coordinator leads and the broker takes requests, as far as is known."""
        return bool(not self._fault and self._looks.last and self._looks.last.view.is_open)

    def take(self, seen: Look | BrokerUnavailable) -> None:
        """The next look, or why there was none."""
        if isinstance(seen, Look):
            self._looks.add(seen)
            self._fault, self._seen_at = "", time.monotonic()
        else:
            away_s = time.monotonic() - self._seen_at
            self._fault = f"Seen {away_s:.0f} s ago, trying again: {seen}"

    def draw(self, height: int) -> RenderableType:
        """The picture for a screen of so many lines; 0 for no bound."""
        paper = Paper(self._console.width, height)
        return frame(self._looks, self._place, paper, self._fault)
