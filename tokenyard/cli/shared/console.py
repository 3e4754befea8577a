"""Where everything for people and programs is printed.

Ids, models and errors were chosen by clients, and answers by models: nothing of them can move a
cursor, set a colour or turn the direction of a text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tokenyard.protocol.texts import harmless, harmless_json

#: Columns of what is no terminal: enough for every worker's name.
_FILE_WIDTH: Final = 200


def say(text: str | bytes = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a text, or JSON, which comes as bytes."""
    shown = harmless_json(text.decode()) if isinstance(text, bytes) else harmless(text)
    click.echo(shown, nl=nl, err=err)


def say_answer(text: str, *, nl: bool = True) -> None:
    """Print what a model has answered: to a program as it is, on a terminal like all else."""
    click.echo(harmless(text) if sys.stdout.isatty() else text, nl=nl)


class HarmlessConsole(Console):
    """A console that shows what is no text as Python writes it."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """What rich makes of something, but for its own codes made harmless."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)


def plain_console(**options: Any) -> Console:
    """Standard output, where brackets and numbers in what users wrote stay as they are."""
    console = HarmlessConsole(highlight=False, markup=False, **options)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
