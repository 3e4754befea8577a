"""Files of lines, plain or compressed by their suffix: ``.gz``, ``.zst`` or anything else.

A compressed file is a sequence of complete members (zstd calls them frames), each with whole
lines. So it can be appended to, and after a kill it is truncated after its last whole member.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol, cast

from tokenyard.protocol.errors import PermanentError, SettingsError
from tokenyard.protocol.texts import pip_install

#: A longer line is invalid and is not read into memory.
MAX_LINE_BYTES: Final = 64 * 1024 * 1024
_CHUNK: Final = 1024 * 1024
#: Small, because compressed data may expand a thousandfold.
_PIECE: Final = 64 * 1024
_GZIP_WINDOW: Final = 31  # zlib's code for a gzip header
_GZIP_LEVEL: Final = 6
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

#: A line with its number, from 1, without its newline; None for a line that is too long.
NumberedLine = tuple[int, bytes | None]


class LineNumbers:
    """A set of line numbers that takes one bit for each line up to the largest."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Add a number; False if it was in the set already."""
        if number in self:
            return False
        at = number >> 3
        if at >= len(self._bits):
            # Room to spare, so that a growing set is not copied for each number.
            self._bits.extend(bytes(at + at // 4 + 64 - len(self._bits)))
        self._bits[at] |= 1 << (number & 7)
        self._count += 1
        return True


class UnreadableFile(PermanentError):
    """A batch file cannot be read or written; the message names it and the cause."""


class _Decompressor(Protocol):
    """Decompresses one member; common to zlib and zstandard."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def zstandard() -> Any:
    """The library; raises `SettingsError` where it is not installed."""
    try:
        import zstandard as library
    except ImportError as error:
        raise SettingsError(
            [f"a file name that ends in .zst needs zstandard: {pip_install('batch')}"]
        ) from error
    return library


def is_compressed(path: Path) -> bool:
    """Whether its suffix is that of a compressed file."""
    return path.suffix in {".gz", ".zst"}


def check_codec(path: Path) -> None:
    """Raises `SettingsError` if the library for its suffix is not installed."""
    if path.suffix == ".zst":
        zstandard()


def member(path: Path, data: bytes) -> bytes:
    """``data`` as it is appended to the file: as a whole member if it is compressed."""
    if path.suffix == ".gz":
        # Without a time, so that the same lines give the same bytes.
        return gzip.compress(data, _GZIP_LEVEL, mtime=0)
    if path.suffix == ".zst":
        return cast(bytes, zstandard().ZstdCompressor().compress(data))
    return data


def _decompressor(path: Path) -> _Decompressor:
    if path.suffix == ".gz":
        return zlib.decompressobj(_GZIP_WINDOW)
    return cast(_Decompressor, zstandard().ZstdDecompressor().decompressobj())


class _Members(io.RawIOBase):
    """Reads the text of a sequence of members; knows where the last whole one ends."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = path.open("rb")
        self._part: _Decompressor | None = None  # None between members
        self._compressed = b""
        self._text = b""
        self._at = 0  # in the file, after ``_compressed``
        #: Where the last whole member ends.
        self.end = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`; raises `UnreadableFile` for corrupt or truncated data."""
        while not self._text:
            if not self._compressed:
                self._compressed = self._file.read(_PIECE)
                self._at += len(self._compressed)
            if not self._compressed:
                if self._part is not None:
                    raise UnreadableFile(f"{self._path}: the compressed data is truncated")
                return 0
            self._text = self._decompress()
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _decompress(self) -> bytes:
        if self._part is None:
            self._part = _decompressor(self._path)
        part = self._part
        try:
            text = part.decompress(self._compressed)
        except Exception as error:
            if not _is_bad_data(error):
                raise
            raise UnreadableFile(
                f"{self._path}: the compressed data is corrupt: {error}"
            ) from error
        self._compressed = part.unused_data if part.eof else b""
        if part.eof:
            self.end = self._at - len(self._compressed)
            self._part = None
        return text


def _is_bad_data(error: Exception) -> bool:
    # By name, because zstandard may not be installed.
    return isinstance(error, zlib.error) or type(error).__name__ == "ZstdError"


def open_text(path: Path) -> IO[bytes]:
    """The file's text as bytes; raises OSError."""
    if is_compressed(path):
        return cast(IO[bytes], io.BufferedReader(_Members(path), _CHUNK))
    return path.open("rb", buffering=_CHUNK)


def read_lines(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[NumberedLine]:
    """The lines of a file that are not blank, with their numbers; at most one is in memory.

    Raises `UnreadableFile`.
    """
    try:
        with open_text(path) as file:
            yield from _lines(file, max_bytes)
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror or error}") from error


def _lines(file: IO[bytes], max_bytes: int) -> Iterator[NumberedLine]:
    number = 0
    while raw := file.readline(max_bytes + 1):
        number += 1
        if len(raw) > max_bytes and not raw.endswith(b"\n"):
            _skip_line(file)
            yield number, None
            continue
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if line := raw.strip():
            yield number, line


def _skip_line(file: IO[bytes]) -> None:
    while piece := file.readline(_CHUNK):
        if piece.endswith(b"\n"):
            return


def cut_torn_end(path: Path) -> int:
    """Truncate what a killed writer left half written; the number of bytes removed."""
    size = path.stat().st_size
    end = _end_of_members(path) if is_compressed(path) else _end_of_lines(path, size)
    if end < size:
        os.truncate(path, end)
    return size - end


def _end_of_lines(path: Path, size: int) -> int:
    """Where the last whole line ends."""
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - _CHUNK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _end_of_members(path: Path) -> int:
    """Where the last whole member ends."""
    with _Members(path) as members:
        buffer = bytearray(_CHUNK)
        try:
            while members.readinto(buffer):
                pass
        except UnreadableFile:
            pass
        return members.end


def write_whole(path: Path, text: bytes) -> None:
    """Replace a file atomically."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(text)
    new.replace(path)
