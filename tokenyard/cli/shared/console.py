"""Prints text and JSON.

Ids, model names and errors come from clients, and answers from models: they are printed so that
they cannot move the cursor, set a colour or reverse the direction of text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

import click
import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tokenyard.protocol.texts import harmless, harmless_json

#: Width of output to a file.
_FILE_WIDTH: Final = 200


def say(text: str | bytes = "", *, err: bool = False) -> None:
    """Print a text, or JSON, which comes as bytes."""
    shown = harmless_json(text.decode()) if isinstance(text, bytes) else harmless(text)
    click.echo(shown, err=err)


def say_answer(text: str, *, nl: bool = True) -> None:
    """Print an answer of a model: unchanged to a program, escaped on a terminal."""
    click.echo(harmless(text) if sys.stdout.isatty() else text, nl=nl)


def print_list(items: Iterable[object]) -> None:
    """Print a JSON array with one element per line."""
    lines = [msgspec.json.encode(item).decode() for item in items]
    say(("[\n" + ",\n".join(lines) + "\n]").encode() if lines else b"[]")


class HarmlessConsole(Console):
    """A console that escapes control characters."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render, and escape everything except rich's own codes."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)


def plain_console() -> Console:
    """Standard output without markup and highlighting."""
    console = HarmlessConsole(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
