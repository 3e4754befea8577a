"""What a batch job on S3 has done so far, in numbered parts beside its output.

    <output id>.parts/000001   what both outputs got, and the job's state; written once
    <output id>.whole          the number of the last part from which the outputs were made

`spool` writes parts and deletes them once the job has stored its outputs. Where RQ has given up the
job, there are parts alone: then a gateway makes the outputs of them.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final, Self

import msgspec
from msgspec import Struct

from gateway.batches.storage import Storage, Upload

#: Whoever asks for a batch waits so long for its outputs to be made.
_WAIT_S: Final = 2.0

_log = logging.getLogger("tokenyard.gateway")


class Piece(Struct, frozen=True):
    """What a file got, and where it begins there."""

    at: int
    content: bytes


class Part(Struct, frozen=True):
    """What both outputs of a job got since the part before, and the job's state then."""

    results: Piece
    errors: Piece
    state: bytes


def part_folder(output: str) -> str:
    """The prefix of the names of an output's parts."""
    return f"{output}.parts/"


def part_name(output: str, number: int) -> str:
    """Where a part lies."""
    return f"{part_folder(output)}{number:06}"


def part_number(name: str) -> int:
    """The number of a part."""
    return int(name.rpartition("/")[2])


def read_part(storage: Storage, name: str) -> Part:
    """Read a part."""
    return msgspec.msgpack.decode(storage.read(name), type=Part)


def beside(storage: Storage, output: str) -> list[str]:
    """The names of all that lies beside an output because of its parts."""
    return [*sorted(storage.names(part_folder(output))), _mark(output)]


def _mark(output: str) -> str:
    return f"{output}.whole"


class WholeOutputs:
    """Makes the outputs of jobs that RQ has given up, one at a time; thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._thread = ThreadPoolExecutor(1, "whole-outputs")
        self._made: dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def are_whole(self, output: str, errors: str) -> bool:
        """Whether a job that is over has its outputs; where it has parts alone, they are made.

        Waits for that for a moment: False means to ask again.
        """
        names = sorted(self._storage.names(part_folder(output)))
        # Those behind the first are deleted after it: then the outputs are stored.
        if not names or part_number(names[0]) != 1 or self._is_marked(output, names[-1]):
            return True
        with self._lock:
            wait_s = 0.0 if self._made else _WAIT_S
            if output not in self._made:
                self._made[output] = self._thread.submit(self._make, output, errors, names)
            made = self._made[output]
        try:
            made.result(wait_s)
        except TimeoutError:
            return False
        except OSError as error:  # among them: a worker that still lives has written or deleted
            _log.warning("%s: not made of its parts yet: %s", output, error)
            return False
        return True

    def _is_marked(self, output: str, last: str) -> bool:
        try:
            return int(self._storage.read(_mark(output))) == part_number(last)
        except FileNotFoundError:
            return False

    def _make(self, output: str, errors: str, names: list[str]) -> None:
        try:
            last = self._close_parts(output, names)
            with ExitStack() as stack:
                results = stack.enter_context(_Whole(self._storage, output))
                failed = stack.enter_context(_Whole(self._storage, errors))
                for name in names:
                    part = read_part(self._storage, name)
                    results.put(part.results)
                    failed.put(part.errors)
                results.commit()
                failed.commit()
            self._storage.write(f"{output}.state", part.state)
            self._storage.write(_mark(output), b"%d" % last)
        finally:
            with self._lock:
                del self._made[output]

    def _close_parts(self, output: str, names: list[str]) -> int:
        """Write an empty part after the last one; its number.

        An earlier worker of this batch that still runs fails to write a part with that number, and
        stops. Otherwise it could add a part that the whole files lack.
        """
        last, number = read_part(self._storage, names[-1]), part_number(names[-1])
        if not last.results.content and not last.errors.content:
            return number  # it was closed before
        results, errors = (
            Piece(one.at + len(one.content), b"") for one in (last.results, last.errors)
        )
        packed = msgspec.msgpack.encode(Part(results, errors, last.state))
        self._storage.write(part_name(output, number + 1), packed, is_exclusive=True)
        return number + 1


class _Whole:
    """An object that is made of pieces; one that begins at 0 begins the object again."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._size = 0
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._upload: Upload = self._opened.enter_context(self._storage.upload(self._name))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def put(self, piece: Piece) -> None:
        if piece.at == 0 and self._size:
            self._opened.close()
            self._size = 0
            self.__enter__()
        if piece.content:
            self._upload.write(piece.content)
            self._size += len(piece.content)

    def commit(self) -> None:
        if self._size:
            self._upload.commit()
        else:
            self._storage.delete(self._name)
