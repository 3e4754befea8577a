"""The files of a batch job whose storage is S3, which cannot append.

A job works on files in a temporary folder. About every five seconds what it has added goes into a
numbered part beside its output (see `parts`), so that another worker, on this host or another, can
go on. Once the job is over, the outputs are stored whole and the parts are deleted.

A part is written only if its number is free. So where RQ has given up a worker that still lives,
the slower one finds out, and stops.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from gateway.batches.files import open_bucket
from gateway.batches.parts import (
    Part,
    Piece,
    beside,
    part_folder,
    part_name,
    part_number,
    read_part,
)
from tokenyard import clock
from tokenyard.batch.outputs import OutputInUse
from tokenyard.batch.rq.jobs import FOLDER_PREFIX
from tokenyard.batch.state import BatchSpec, load_state
from tokenyard.process.home import owned_folder

#: So long after the last part, or after so many new bytes, the next one is written.
_EVERY_S: Final = 5.0
_MOST_BYTES: Final = 8 * 1024 * 1024

_log = logging.getLogger("tokenyard.batch")


class Spool:
    """The files of one job; thread-safe."""

    def __init__(self, spec: BatchSpec, folder: Path) -> None:
        place = spec.input.rpartition("/")[0]
        self._storage = open_bucket(place)
        self._input, self._output, self._errors = (
            url.removeprefix(f"{place}/") for url in (spec.input, spec.output, spec.errors)
        )
        self.spec = msgspec.structs.replace(
            spec,
            input=str(folder / "input"),
            output=str(folder / "output"),
            errors=str(folder / "errors"),
        )
        self._number = 0  # of the last part
        self._results = _LineFile(self.spec.output_path)
        self._failed = _LineFile(self.spec.errors_path)
        self._kept_at = clock.monotonic()
        self._lock = threading.Lock()

    def restore(self) -> None:
        """Copy the input here, and what earlier workers did."""
        self._storage.fetch(self._input, self.spec.input_path)
        for name in sorted(self._storage.names(part_folder(self._output))):
            part = read_part(self._storage, name)
            self._number = part_number(name)
            self._results.put(part.results)
            self._failed.put(part.errors)
            self.spec.state_path.write_bytes(part.state)
        if not self._number:  # a job that was over, and runs again
            for name, path in self._objects():
                with contextlib.suppress(FileNotFoundError):
                    self._storage.fetch(name, path)
        if (state := load_state(self.spec.state_path)) is not None:
            state.spec = self.spec  # the worker that wrote it had another folder
            state.save()

    def _objects(self) -> Iterator[tuple[str, Path]]:
        yield self._output, self.spec.output_path
        yield self._errors, self.spec.errors_path
        yield f"{self._output}.state", self.spec.state_path

    def keep(self) -> None:
        """Write parts if it is time; raises `OutputInUse` where another worker has the job."""
        with self._lock:
            added = self._results.added + self._failed.added
            is_due = clock.monotonic() - self._kept_at >= _EVERY_S
            if added >= _MOST_BYTES or (added and is_due):
                try:
                    self._keep()
                except OSError as error:
                    self._kept_at = clock.monotonic()
                    _log.warning("%s: %s; the job goes on", self._output, error)

    def _keep(self) -> None:
        while True:
            results, errors = self._results.take(), self._failed.take()
            if not results.content and not errors.content:
                break
            self._write(Part(results, errors, self.spec.state_path.read_bytes()))
            self._results.kept = results.at + len(results.content)
            self._failed.kept = errors.at + len(errors.content)
        self._kept_at = clock.monotonic()

    def _write(self, part: Part) -> None:
        name = part_name(self._output, self._number + 1)
        packed = msgspec.msgpack.encode(part)
        try:
            self._storage.write(name, packed, is_exclusive=True)
        except FileExistsError as error:
            # An attempt whose answer was lost may have written it.
            if self._storage.read(name) != packed:
                raise OutputInUse(f"{self._output}: another process writes to it") from error
        self._number += 1

    def hand_over(self) -> None:
        """Write what no part has yet."""
        with self._lock:
            self._keep()

    def publish(self) -> None:
        """Store the outputs of a job that is over, and delete its parts."""
        self.hand_over()
        for name, path in self._objects():
            if path.exists() and path.stat().st_size:
                self._storage.store(path, name)
            else:
                self._storage.delete(name)
        for name in beside(self._storage, self._output):
            self._storage.delete(name)


@contextlib.contextmanager
def spooled(spec: BatchSpec) -> Iterator[Spool]:
    """The files of a job in a temporary folder."""
    with owned_folder(FOLDER_PREFIX) as folder:
        spool = Spool(spec, folder)
        spool.restore()
        try:
            yield spool
        finally:  # for the next worker, where there will be one
            with contextlib.suppress(OSError, OutputInUse):
                spool.hand_over()


class _LineFile:
    """A file that grows by lines, and may be replaced by another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self.kept = 0  # bytes that are in parts

    @property
    def added(self) -> int:
        """Bytes that are in no part."""
        if not self._path.exists():
            return 0
        found = self._path.stat()
        return found.st_size - (self.kept if found.st_ino == self._inode else 0)

    def take(self) -> Piece:
        """Whole lines that are in no part; of a new file, its first ones."""
        if not self._path.exists():
            return Piece(0, b"")
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self.kept = inode, 0
            file.seek(self.kept)
            content = file.read(_MOST_BYTES)
            if len(content) == _MOST_BYTES:
                content += file.readline()
        return Piece(self.kept, content[: content.rfind(b"\n") + 1])

    def put(self, piece: Piece) -> None:
        """Write a piece back."""
        with self._path.open("r+b" if self._path.exists() else "xb") as file:
            file.seek(piece.at)
            file.write(piece.content)
            file.truncate()
            self._inode = os.fstat(file.fileno()).st_ino
        self.kept = piece.at + len(piece.content)
