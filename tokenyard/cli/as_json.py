"""Lists as JSON."""

from __future__ import annotations

from collections.abc import Iterable

import click
import msgspec


def print_list(items: Iterable[object]) -> None:
    """Print an array with one element a line; ``[]`` where there is none."""
    lines = [msgspec.json.encode(item).decode() for item in items]
    click.echo("[\n" + ",\n".join(lines) + "\n]" if lines else "[]")
