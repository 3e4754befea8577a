"""The output files of a job: what is done stands in them, and nowhere else.

A line is done when it stands in one of the two files. On start both are read back; what a killed
process has left half written is cut off, and runs again under the same request id.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tokenyard.batch.answers import OutputLine, encode_line, read_done, short
from tokenyard.batch.files import (
    UnreadableFile,
    cut_torn_end,
    is_compressed,
    member,
    read_lines,
)
from tokenyard.batch.marks import Marks
from tokenyard.protocol.errors import PermanentError

#: Lines wait in memory for company until they are so many bytes, or so old.
_FLUSH_BYTES: Final = 256 * 1024
FLUSH_EVERY_S: Final = 0.25
#: Compressed lines wait longer, since many small members compress badly.
_MEMBER_BYTES: Final = 4 * 1024 * 1024
_MEMBER_EVERY_S: Final = 2.0
_LOCK_POLL_S: Final = 0.1


class OutputInUse(PermanentError):
    """Another process works on this output."""


class LineFile:
    """A file that lines are appended to; safe for several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0  # of lines, those of earlier processes too
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._flushed_at = time.monotonic()
        self._most_bytes, self._most_s = (
            (_MEMBER_BYTES, _MEMBER_EVERY_S)
            if is_compressed(path)
            else (_FLUSH_BYTES, FLUSH_EVERY_S)
        )
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as fault:
            raise UnreadableFile(f"{path}: {fault.strerror}") from fault
        self._size = os.fstat(self._fd).st_size

    def lock(self, within_s: float) -> None:
        """Keep other processes away until this one ends; raises `OutputInUse`."""
        give_up = time.monotonic() + within_s
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as fault:
                if time.monotonic() >= give_up:
                    raise OutputInUse(f"{self.path}: another process works on it") from fault
                time.sleep(_LOCK_POLL_S)

    def append(self, line: bytes) -> None:
        """Add a line; it is in the file soon, see `flush_old`."""
        with self._lock:
            self._waiting += line
            self.count += 1
            if len(self._waiting) >= self._most_bytes:
                self._flush()

    def flush_old(self) -> None:
        """Write what has waited long enough."""
        with self._lock:
            if time.monotonic() - self._flushed_at >= self._most_s:
                self._flush()

    def flush(self) -> None:
        """Write everything."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if not self._waiting:
            return
        data = member(self.path, bytes(self._waiting))
        try:
            if os.fstat(self._fd).st_size != self._size:
                # The last time was broken off, by a full disk or by a signal.
                os.ftruncate(self._fd, self._size)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as fault:
            raise UnreadableFile(f"{self.path}: {fault.strerror}") from fault
        self._size += len(data)
        self._waiting.clear()

    def measure(self) -> None:
        """Go on behind what is in the file now."""
        self._size = os.fstat(self._fd).st_size

    def sync(self) -> None:
        """Write everything, down to the disk."""
        self.flush()
        os.fsync(self._fd)

    def close(self) -> None:
        """Give the file up; what waits is lost. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Outputs:
    """Both files of one job, and which lines of the input are done."""

    def __init__(self, results: Path, errors: Path, lock_within_s: float = 0.0) -> None:
        self.done = Marks()
        self._lock = threading.Lock()
        self.results = LineFile(results)
        try:
            self.errors = LineFile(errors)
            self.results.lock(lock_within_s)
        except BaseException:
            self.results.close()
            raise

    @property
    def counts(self) -> tuple[int, int]:
        """Lines with a result, and lines with an error."""
        return self.results.count, self.errors.count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.results.close()
        self.errors.close()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return not (self.results.path.stat().st_size or self.errors.path.stat().st_size)

    @staticmethod
    def written(results: Path, errors: Path, job: str) -> tuple[int, int]:
        """What the files have, results and errors; raises as `recover`. Changes nothing."""
        marks = Marks()
        counts = []
        for path in (results, errors):
            before = len(marks)
            for number, raw in read_lines(path):
                done = read_done(raw) if raw is not None else None
                if done is None or done[0] != short(job) or not marks.add(done[1]):
                    raise UnreadableFile(f"{path}: line {number} is none of this job, or double")
            counts.append(len(marks) - before)
        return counts[0], counts[1]

    def recover(self, job: str) -> int:
        """Read back what is done; the bytes cut off. Raises `UnreadableFile` for strange lines."""
        self.done = Marks()
        return self._recover(self.results, job) + self._recover(self.errors, job)

    def _recover(self, file: LineFile, job: str) -> int:
        cut = cut_torn_end(file.path)
        strange = file.count = 0
        for number, raw in read_lines(file.path):
            done = read_done(raw) if raw is not None and not strange else None
            if strange or (done is None and is_compressed(file.path)):
                raise UnreadableFile(
                    f"{file.path}: line {strange or number} was not written by this job"
                )
            if done is None:
                strange = number
                continue
            if done[0] != short(job):
                raise UnreadableFile(
                    f"{file.path}: line {number} was written by job batch_{done[0]}"
                )
            if not self.done.add(done[1]):
                raise UnreadableFile(
                    f"{file.path}: line {number} is a second answer to line {done[1]}"
                )
            file.count += 1
        if strange:
            # A machine that lost power may leave a last line that is there, but not its text.
            cut += _cut_last_line(file.path)
        file.measure()
        return cut

    def reopen(self, codes: Collection[str] | None) -> int:
        """Take errors with these codes out, or all, so that their lines run again; how many.

        The file changes in one step, so that a kill leaves it as it was or as it is to be.
        """
        cut_torn_end(self.errors.path)
        # Its name ends alike, so that it is compressed alike.
        new = self.errors.path.with_name(f"new.{self.errors.path.name}")
        new.unlink(missing_ok=True)
        kept, taken = LineFile(new), 0
        for _, raw in read_lines(self.errors.path):
            done = read_done(raw) if raw is not None else None
            if done is not None and (codes is None or done[2] in codes):
                taken += 1
            elif raw is not None:
                kept.append(raw + b"\n")
        kept.sync()
        kept.close()
        self.errors.close()
        new.replace(self.errors.path)
        self.errors = LineFile(self.errors.path)
        return taken

    def write(self, number: int, line: OutputLine) -> bool:
        """Answer a line of the input; False where it has an answer already."""
        with self._lock:
            if not self.done.add(number):
                return False
            (self.results if line.error is None else self.errors).append(encode_line(line))
            return True

    def clear(self) -> None:
        """Delete everything that was ever written."""
        for file in (self.results, self.errors):
            os.truncate(file.path, 0)
            file.measure()

    def flush(self) -> None:
        """Write everything."""
        self.results.flush()
        self.errors.flush()

    def flush_old(self) -> None:
        """Write what has waited long enough."""
        self.results.flush_old()
        self.errors.flush_old()

    def sync(self) -> None:
        """Write everything, down to the disk."""
        self.results.sync()
        self.errors.sync()


def _cut_last_line(path: Path) -> int:
    """Cut off the last line of a plain file; the number of bytes."""
    size = path.stat().st_size
    os.truncate(path, size - 1)  # its end, so that it is torn
    return 1 + cut_torn_end(path)
