"""The errors of a job by line, from the beginning of its file of errors.

Its path comes from RQ, which is not trusted: only lines that are errors of a batch are ever shown,
and only so much of a regular file is read.
"""

from __future__ import annotations

import contextlib
import io
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from msgspec import Struct

from tokenyard.batch.answers import LineError
from tokenyard.batch.files import UnreadableFile, open_text
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.parse import BadJson, ForeignJson

_MOST_BYTES: Final = 1024 * 1024
_PIECE: Final = 64 * 1024


class FailedLine(Struct, frozen=True):
    """A line of the input without a result."""

    error: LineError
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class LineErrors:
    """The first errors of a job."""

    lines: Sequence[FailedLine]
    is_whole: bool  # False: the file has more, or cannot be read further
    problem: str = ""  # why it cannot be read


_decode = ForeignJson[FailedLine](FailedLine).decode


def read_line_errors(path: Path, most: int = 100) -> LineErrors:
    """The first errors in a job's file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return LineErrors((), is_whole=False, problem="it is no regular file")
    except (OSError, ValueError):
        return LineErrors((), is_whole=False, problem="it is not there, or not on this host")
    text, problem = _beginning(path)
    is_cut = len(text) > _MOST_BYTES or bool(problem)
    raw_lines = text[:_MOST_BYTES].splitlines()
    if is_cut and raw_lines:
        raw_lines.pop()  # it may be torn
    found = []
    for raw in raw_lines:
        with contextlib.suppress(BadJson):
            found.append(_decode(raw))
    return LineErrors(found[:most], is_whole=not is_cut and len(found) <= most, problem=problem)


def _beginning(path: Path) -> tuple[bytes, str]:
    """The first bytes of its text, decompressed, and why there are not more."""
    text = bytearray()
    try:
        with open_text(path) as file:
            # In single reads, so that an error loses nothing that was read before.
            pieces = cast(io.BufferedReader, file)
            while len(text) <= _MOST_BYTES and (piece := pieces.read1(_PIECE)):
                text += piece
    except UnreadableFile:
        return bytes(text), "the rest of it is not written yet, or corrupt"
    except (OSError, SettingsError) as error:
        return bytes(text), f"it cannot be read: {error}"
    return bytes(text), ""
