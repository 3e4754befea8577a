"""Reading what a coordinator has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from coordinator.routing.selection import Decision, Placing


def read_decisions(path: Path) -> list[Decision]:
    """The assignments, in order."""
    return [msgspec.convert(line, Decision) for line in _lines(path) if "place" not in line]


def read_placings(path: Path) -> list[Placing]:
    """The commands to load models, in order."""
    return [msgspec.convert(line, Placing) for line in _lines(path) if "place" in line]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(msgspec.json.decode, path.read_bytes().splitlines())
