"""Rows of a table: each becomes a request, and its answer is found again by the row's number."""

from __future__ import annotations

import base64
import datetime
import decimal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenyard.batch.answers import OutputLine, read_line_number
from tokenyard.batch.lines import BadLine, ParsedLine
from tokenyard.batch.state import BatchSpec
from tokenyard.batch.tables import Row, RowAnswer, fill_template
from tokenyard.client import checks
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.media import MAX_MEDIA_BYTES
from tokenyard.protocol.wire import GENERATE

#: Values that a template takes beside text, as Python writes them.
_PLAIN: Final = (bool, int, float, decimal.Decimal, datetime.date, datetime.time)


class BadRow(ValueError):
    """A row has no prompt."""


def parse_row(spec: BatchSpec, number: int, row: Row) -> ParsedLine | BadLine:
    """The request of a row."""
    name = str(number)
    try:
        new = next((column for column in spec.new_columns.names if column in row), None)
        if new is not None:
            raise BadRow(f"the row has {new!r} already: choose --into")
        prompt = _prompt(spec, row)
        if spec.task != GENERATE:
            # Alone first, because a bad one would spoil the request that it shares with others.
            checks.parse_inputs([prompt])
    except (BadRow, UnicodeEncodeError) as error:
        return BadLine(None, str(error), "invalid_row")
    except InvalidRequest as error:
        return BadLine(None, f"prompt: {error.message}", "invalid_row")
    return ParsedLine(name, "row", prompt, {"task": spec.task}, {})


def _prompt(spec: BatchSpec, row: Row) -> Any:
    for column in spec.columns:
        if row.get(column) is None:
            raise BadRow(f"the row has no {column!r}")
    if not spec.column:
        text = fill_template(
            spec.prompt or spec.message,
            {name: _text(name, row[name]) for name in spec.columns if name != spec.image},
        )
        if not spec.message:
            return text
        content: Any = text
        if spec.image:
            content = [_picture(spec, row[spec.image]), {"type": "text", "text": text}]
        return [{"role": "user", "content": content}]
    value = row[spec.column]
    if not value:
        raise BadRow(f"{spec.column!r} is empty")
    if isinstance(value, list) and isinstance(value[0], dict):
        # Parquet has all fields of any message in each.
        return [{k: v for k, v in message.items() if v is not None} for message in value]
    if not isinstance(value, str | list):
        raise BadRow(f"{spec.column!r} is {type(value).__name__}, not text, token ids or messages")
    return value


def _picture(spec: BatchSpec, value: Any) -> dict[str, Any]:
    """A picture of a row as a part of a message."""
    if isinstance(value, dict):  # as data sets have it
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and not value.startswith("data:"):
        source = spec.input_path
        path = (source if source.is_dir() else source.parent) / value
        try:
            value = path.read_bytes() if path.stat().st_size <= MAX_MEDIA_BYTES else b""
        except OSError as error:
            raise BadRow(f"{spec.image!r}: {path}: {error.strerror}") from error
        if not value:
            raise BadRow(f"{spec.image!r}: {path}: is empty, or too large")
    if isinstance(value, bytes):
        value = f"data:image;base64,{base64.b64encode(value).decode()}"
    if not isinstance(value, str):
        raise BadRow(f"{spec.image!r} is {type(value).__name__}, not a picture or its path")
    return {"type": "image_url", "image_url": {"url": value}}


def _text(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    if not isinstance(value, _PLAIN):
        raise BadRow(f"{column!r} is {type(value).__name__}, not text")
    return str(value)


_decode: Final = msgspec.json.Decoder(OutputLine).decode


def read_answers(results: Path, errors: Path, rows: int) -> Iterator[RowAnswer]:
    """The answers in two files of `answers.OutputLine`, in the order of the rows.

    Takes 8 bytes of memory for a row: where its answer begins.
    """
    found = array("q", bytes(8 * (rows + 1)))
    with results.open("rb") as good, errors.open("rb") as bad:
        files = (good, bad)
        for which, file in enumerate(files):
            begin = 0
            for raw in file:
                found[read_line_number(raw)] = begin << 1 | which
                begin += len(raw)
        for place in found[1:]:
            file = files[place & 1]
            file.seek(place >> 1)
            line = _decode(file.readline())
            if line.error is not None:
                yield RowAnswer(error=f"{line.error.code}: {line.error.message}")
            elif line.response is not None:
                yield msgspec.convert(line.response.body, RowAnswer)
