"""Where tables for people are printed."""

from __future__ import annotations

from typing import Final

from rich.console import Console

#: Columns of what is no terminal: enough for every worker's name.
_FILE_WIDTH: Final = 200


def plain_console() -> Console:
    """Standard output, where brackets and numbers in what users wrote stay as they are."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
