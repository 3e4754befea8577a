"""Lists as JSON."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenyard.cli.shared.console import say


def print_list(items: Iterable[object]) -> None:
    """Print an array with one element a line; ``[]`` where there is none."""
    lines = [msgspec.json.encode(item).decode() for item in items]
    say(("[\n" + ",\n".join(lines) + "\n]").encode() if lines else b"[]")
