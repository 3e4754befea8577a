"""Where files, batches and results lie: the seam behind which there is a folder or S3.

The folder is one that gateways and batch workers share; nobody but their user can read in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, Protocol, Self

from tokenyard import clock
from tokenyard.protocol.errors import SettingsError

S3_SCHEME: Final = "s3://"
#: An upload without a new byte for so long was left behind by a gateway that was killed.
_ABANDONED_S: Final = 3600.0
_PART: Final = ".part"
_PIECE: Final = 256 * 1024
_OWN_FOLDER: Final = 0o700
_OWN_FILE: Final = 0o600


@dataclass(frozen=True, slots=True)
class Stored:
    """What a storage knows of an object."""

    size: int
    modified_at: int  # unix seconds


class Upload(Protocol):
    """An object that does not exist yet."""

    def write(self, piece: bytes) -> None:
        """Add a piece of the content."""

    def commit(self) -> int:
        """Make the object exist, whole and durable; its size."""


class Storage(Protocol):
    """Objects by their names; each exists whole or not at all.

    Names have folders: ``tenant-a/file-1``. Who calls makes them of ids that were checked. All
    calls may block, and raise `OSError`; `FileNotFoundError` where there is no such object.
    """

    def start(self) -> None:
        """Make it ready; raises `SettingsError` where it cannot be used."""

    def read(self, name: str) -> bytes:
        """The content of a small object."""

    def pieces(self, name: str) -> Generator[bytes, None, None]:
        """The content of any object, piece by piece."""

    def look(self, name: str) -> Stored | None:
        """What is known of an object; None where there is none."""

    def write(self, name: str, content: bytes, *, is_exclusive: bool = False) -> None:
        """Write a small object, durably.

        Replaces the one before, or with ``is_exclusive`` raises `FileExistsError`.
        """

    def upload(self, name: str) -> contextlib.AbstractContextManager[Upload]:
        """Write an object piece by piece; without a commit nothing is left of it."""

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""

    def names(self, prefix: str) -> Mapping[str, int]:
        """The names in one folder that begin with a prefix, with the sizes of their objects."""

    def location(self, name: str) -> str:
        """Path or URL of an object, by which a batch worker finds it."""


class FolderStorage:
    """Objects as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        """Make the folder, and remove what killed gateways left half written.

        Raises `SettingsError` where it cannot be made.
        """
        try:
            self._folder.mkdir(mode=_OWN_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            fault = f"files_dir: no folder can be made at {self._folder}: {error.strerror}"
            raise SettingsError([fault]) from error
        long_ago = clock.wall() - _ABANDONED_S
        for part in self._folder.glob(f"*/*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_mtime < long_ago:
                    part.unlink()

    def path(self, name: str) -> Path:
        """The file of an object."""
        return self._folder / name

    def _place(self, name: str) -> Path:
        """The file of an object to be written, in its folder."""
        path = self.path(name)
        path.parent.mkdir(mode=_OWN_FOLDER, parents=True, exist_ok=True)
        return path

    def read(self, name: str) -> bytes:
        """See `Storage`."""
        return self.path(name).read_bytes()

    def pieces(self, name: str) -> Generator[bytes, None, None]:
        """See `Storage`."""
        with self.path(name).open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                yield piece

    def look(self, name: str) -> Stored | None:
        """See `Storage`."""
        try:
            found = self.path(name).stat()
        except FileNotFoundError:
            return None
        return Stored(found.st_size, int(found.st_mtime))

    def write(self, name: str, content: bytes, *, is_exclusive: bool = False) -> None:
        """See `Storage`."""
        path = self._place(name)
        new = path.with_name(f"{path.name}.{os.urandom(8).hex()}{_PART}")
        try:
            with _create(new) as file:
                _write(file, content)
                os.fsync(file.fileno())
            if is_exclusive:
                os.link(new, path)
            else:
                new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def upload(self, name: str) -> _FileUpload:
        """See `Storage`."""
        return _FileUpload(self._place(name))

    def delete(self, name: str) -> None:
        """See `Storage`."""
        self.path(name).unlink(missing_ok=True)

    def names(self, prefix: str) -> Mapping[str, int]:
        """See `Storage`."""
        folder, _, first = prefix.rpartition("/")
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path(folder)) as entries:
            for entry in entries:
                if entry.name.startswith(first) and not entry.name.endswith(_PART):
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        found[f"{folder}/{entry.name}"] = entry.stat().st_size
        return found

    def location(self, name: str) -> str:
        """See `Storage`."""
        return str(self.path(name).absolute())


class _FileUpload:
    """Writes a file under another name, and renames it at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(path.name + _PART)

    def __enter__(self) -> Self:
        self._file = _create(self._part)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def write(self, piece: bytes) -> None:
        """See `Upload`."""
        _write(self._file, piece)

    def commit(self) -> int:
        """See `Upload`."""
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._part.rename(self._path)
        _sync_folder(self._path.parent)
        return size


def _create(path: Path) -> FileIO:
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWN_FILE), "wb")


def _write(file: FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
