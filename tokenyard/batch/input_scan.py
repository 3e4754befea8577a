"""Counts the lines of an input file, and finds those that repeat an earlier id.

Ids are sorted into buckets on disk, so that only one bucket is in memory at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from msgspec import UNSET, Struct, UnsetType

from tokenyard.batch.files import LineNumbers, read_lines
from tokenyard.batch.state import BatchSpec
from tokenyard.batch.tables import count_rows
from tokenyard.protocol.parse import BadJson, ForeignJson

_BUCKETS: Final = 256
#: A larger bucket is moved to disk; about 2700 ids.
_BUCKET_BYTES: Final = 64 * 1024
_DIGEST_BYTES: Final = 16
_NUMBER_BYTES: Final = 8


class _Named(Struct):
    custom_id: str | int | UnsetType = UNSET
    id: str | int | UnsetType = UNSET


_decode_named = ForeignJson[_Named](_Named).decode


@dataclass(slots=True)
class InputScan:
    """What a scan of an input file found."""

    lines: int = 0  # that are not blank
    named: int = 0  # that are JSON objects with an id
    #: Lines that repeat an earlier id.
    repeated: LineNumbers = field(default_factory=LineNumbers)


def scan_input(spec: BatchSpec) -> InputScan:
    """Read a whole input once; raises `UnreadableFile`."""
    if spec.is_table:
        return InputScan(count_rows(spec.input_path))
    found = InputScan()
    with contextlib.ExitStack() as stack:
        buckets: list[IO[bytes]] = [
            stack.enter_context(tempfile.SpooledTemporaryFile(_BUCKET_BYTES))
            for _ in range(_BUCKETS)
        ]
        for number, raw in read_lines(spec.input_path):
            found.lines += 1
            name = id_of(raw) if raw is not None else None
            if name is not None:
                found.named += 1
                digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
                buckets[digest[0]].write(digest + number.to_bytes(_NUMBER_BYTES, "big"))
        for bucket in buckets:
            _mark_repeated(bucket, found.repeated)
    return found


def _mark_repeated(bucket: IO[bytes], marks: LineNumbers) -> None:
    bucket.seek(0)
    seen: set[bytes] = set()
    while entry := bucket.read(_DIGEST_BYTES + _NUMBER_BYTES):
        digest = entry[:_DIGEST_BYTES]
        if digest in seen:
            marks.add(int.from_bytes(entry[_DIGEST_BYTES:], "big"))
        seen.add(digest)


def numbers_by_id(path: Path) -> dict[str, int]:
    """The first line with each id, in memory as a whole; raises `UnreadableFile`."""
    numbers: dict[str, int] = {}
    for number, raw in read_lines(path):
        if raw is not None:
            numbers.setdefault(id_of(raw) or str(number), number)
    return numbers


def id_of(raw: bytes) -> str | None:
    """The id of a line; None if it has none or is not a JSON object."""
    try:
        named = _decode_named(raw)
    except BadJson:
        return None
    name = named.id if named.custom_id is UNSET else named.custom_id
    return None if name is UNSET else str(name)
