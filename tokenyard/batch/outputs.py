"""The output files of a job, which are the only record of the lines that are done.

A line is done when its answer is in one of the two files. A start reads both; what a killed process
left half written is truncated and runs again under the same request id.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Collection, Mapping
from operator import add
from pathlib import Path
from typing import Final, Self

import msgspec

from tokenyard import clock
from tokenyard.batch.answers import LineOutcome, OutputLine, encode_line, line_id, read_done, short
from tokenyard.batch.files import (
    LineNumbers,
    UnreadableFile,
    cut_torn_end,
    is_compressed,
    member,
    read_lines,
)
from tokenyard.batch.state import BatchUsage, CodeCount, InputTokenDetails, OutputTokenDetails
from tokenyard.protocol.errors import PermanentError, SettingsError

#: Lines are buffered up to this size and age.
_FLUSH_BYTES: Final = 256 * 1024
FLUSH_EVERY_S: Final = 0.25
#: Compressed files have a larger buffer, because small members compress badly.
_MEMBER_BYTES: Final = 4 * 1024 * 1024
_MEMBER_EVERY_S: Final = 2.0
_LOCK_POLL_S: Final = 0.1


class OutputInUse(PermanentError):
    """Another process writes to this output."""


class LineFile:
    """An append-only file of lines; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._flushed_at = clock.monotonic()
        self._most_bytes, self._most_s = (
            (_MEMBER_BYTES, _MEMBER_EVERY_S)
            if is_compressed(path)
            else (_FLUSH_BYTES, FLUSH_EVERY_S)
        )
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UnreadableFile(f"{path}: {error.strerror}") from error
        self._size = os.fstat(self._fd).st_size

    def forget(self) -> None:
        """Count its lines again."""
        self.count = 0  # of lines, including those of earlier processes
        self.tokens = (0, 0, 0, 0)
        self.codes: dict[str, CodeCount] = {}

    def note(self, done: LineOutcome) -> None:
        """Count a line."""
        self.count += 1
        if done.code is None:
            self.tokens = tuple(map(add, self.tokens, done.tokens))
            return
        known = self.codes.setdefault(done.code, CodeCount(done.code, 0, done.number))
        known.lines += 1
        known.first_line = min(known.first_line, done.number)

    def lock(self, within_s: float) -> None:
        """Lock the file until this process ends; raises `OutputInUse`."""
        give_up = clock.monotonic() + within_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._fd).st_ino == self.path.stat().st_ino:
                    return
                raise BlockingIOError  # another process has replaced it
            except (BlockingIOError, FileNotFoundError) as error:
                if clock.monotonic() >= give_up:
                    raise OutputInUse(f"{self.path}: another process writes to it") from error
                clock.sleep(_LOCK_POLL_S)

    def append(self, line: bytes) -> None:
        """Add a line to the buffer; `flush_old` writes it soon."""
        with self._lock:
            self._buffer += line
            if done := read_done(line):
                self.note(done)
            if len(self._buffer) >= self._most_bytes:
                self._flush()

    def flush_old(self) -> None:
        """Write the buffer if it is old enough."""
        with self._lock:
            if clock.monotonic() - self._flushed_at >= self._most_s:
                self._flush()

    def flush(self) -> None:
        """Write the buffer."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._flushed_at = clock.monotonic()
        if not self._buffer:
            return
        data = member(self.path, bytes(self._buffer))
        try:
            if os.fstat(self._fd).st_size != self._size:
                # The previous write was interrupted by a full disk or a signal.
                os.ftruncate(self._fd, self._size)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise UnreadableFile(f"{self.path}: {error.strerror}") from error
        self._size += len(data)
        self._buffer.clear()

    def measure(self) -> None:
        """Continue at the present end of the file."""
        self._size = os.fstat(self._fd).st_size

    def sync(self) -> None:
        """Write the buffer and wait for the disk."""
        self.flush()
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file without writing the buffer; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Outputs:
    """Both files of one job, and the numbers of the lines that are done."""

    def __init__(self, results: Path, errors: Path, lock_within_s: float = 0.0) -> None:
        self.done = LineNumbers()
        self.results = LineFile(results)
        try:
            self.errors = LineFile(errors)
            self.results.lock(lock_within_s)
        except BaseException:
            self.results.close()
            raise

    @property
    def usage(self) -> BatchUsage:
        """The tokens of all results."""
        given, cached, made, reasoned = self.results.tokens
        details = InputTokenDetails(cached), OutputTokenDetails(reasoned)
        return BatchUsage(given, details[0], made, details[1], given + made)

    @property
    def line_errors(self) -> list[CodeCount]:
        """The errors by their codes, the most frequent first."""
        return sorted(self.errors.codes.values(), key=lambda one: (-one.lines, one.code))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.results.close()
        self.errors.close()

    @property
    def is_empty(self) -> bool:
        """Whether both files are empty."""
        return not (self.results.path.stat().st_size or self.errors.path.stat().st_size)

    def recover(self, job: str) -> int:
        """Read what is done; the bytes truncated. Raises `UnreadableFile` for foreign lines."""
        self.done = LineNumbers()
        return self._recover(self.results, job) + self._recover(self.errors, job)

    def _recover(self, file: LineFile, job: str) -> int:
        cut = cut_torn_end(file.path)
        foreign = 0
        file.forget()
        for number, raw in read_lines(file.path):
            done = read_done(raw) if raw is not None and not foreign else None
            if foreign or (done is None and is_compressed(file.path)):
                raise UnreadableFile(
                    f"{file.path}: line {foreign or number} was not written by this job"
                )
            if done is None:
                foreign = number
                continue
            if done.job != short(job):
                raise UnreadableFile(
                    f"{file.path}: line {number} was written by job batch_{done.job}"
                )
            if not self.done.add(done.number):
                raise UnreadableFile(
                    f"{file.path}: line {number} is a second answer to line {done.number}"
                )
            file.note(done)
        if foreign:
            # After a power failure the last line may have its length, but not its text. Without
            # its newline it counts as torn.
            os.truncate(file.path, file.path.stat().st_size - 1)
            cut += 1 + cut_torn_end(file.path)
        file.measure()
        return cut

    def reopen(self, codes: Collection[str] | None) -> None:
        """Remove errors with these codes, or all, so that their lines run again."""

        def keep(raw: bytes) -> bytes | None:
            done = read_done(raw)
            return None if done and (codes is None or done.code in codes) else raw

        self.errors = _replaced(self.errors, keep)

    def renumber(self, job: str, numbers: Mapping[str, int]) -> None:
        """Let results name the lines that have their ids now; raises `SettingsError`."""

        def move(raw: bytes) -> bytes:
            if read_done(raw) is None:
                return raw  # `recover` finds it, too
            line = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            custom_id = msgspec.json.decode(line["custom_id"])
            if custom_id not in numbers:
                raise SettingsError(
                    [f"input: has no line {custom_id!r} any more, which has a result: put it back"]
                )
            line["id"] = msgspec.Raw(msgspec.json.encode(line_id(job, numbers[custom_id])))
            return msgspec.json.encode(line)

        self.results = _replaced(self.results, move)

    def write(self, number: int, line: OutputLine) -> None:
        """Write the answer of an input line, unless it has one already."""
        if self.done.add(number):
            (self.results if line.error is None else self.errors).append(encode_line(line))

    def clear(self) -> None:
        """Empty both files."""
        for file in (self.results, self.errors):
            os.truncate(file.path, 0)
            file.measure()

    def flush(self) -> None:
        """Write the buffer."""
        self.results.flush()
        self.errors.flush()

    def flush_old(self) -> None:
        """Write the buffer if it is old enough."""
        self.results.flush_old()
        self.errors.flush_old()

    def sync(self) -> None:
        """Write the buffer and wait for the disk."""
        self.results.sync()
        self.errors.sync()


def _replaced(file: LineFile, change: Callable[[bytes], bytes | None]) -> LineFile:
    """A file with each line changed, or without it; it is replaced atomically."""
    cut_torn_end(file.path)
    # With the same suffix, so that it is compressed in the same way.
    path = file.path.with_name(f"new.{file.path.name}")
    path.unlink(missing_ok=True)
    new = LineFile(path)
    try:
        new.lock(0.0)
        for _, raw in read_lines(file.path):
            if raw is not None and (line := change(raw)) is not None:
                new.append(line + b"\n")
        new.sync()
        path.replace(file.path)
    except BaseException:
        new.close()
        path.unlink(missing_ok=True)
        raise
    file.close()
    new.path = file.path
    return new
