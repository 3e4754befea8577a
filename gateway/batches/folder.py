"""Files in a folder that gateways and the hosts of batch workers share.

    <folder>/tenant-<name>/<file id>         the content
    <folder>/tenant-<name>/<file id>.json    what is known of it; written last: now it exists
    <folder>/tenant-<name>/<batch id>.json   a batch, see `records`

Names come from ids, which are checked, and from tenants, which are quoted; never from clients.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Self
from urllib.parse import quote

import msgspec

from gateway.batches.files import PREFIX, StoredFile, is_id, new_id

#: The content, and the log of the job that wrote it; its state stays, for the batch's counts.
_BESIDE: Final = ("", ".log")
#: An upload without a new byte for so long was left behind by a gateway that was killed.
_ABANDONED_S: Final = 3600.0
_PART: Final = ".part"


class FolderStore:
    """Files as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        """Make the folder, and remove what killed gateways left half written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        long_ago = time.time() - _ABANDONED_S
        for part in self._folder.glob(f"tenant-*/*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_mtime < long_ago:
                    part.unlink()

    def tenant_folder(self, tenant: str) -> Path:
        """The folder of one tenant; `quote` leaves no separator, and the prefix no dots alone."""
        return self._folder / f"tenant-{quote(tenant, safe='')}"

    @contextlib.contextmanager
    def put(self, tenant: str) -> Iterator[FolderUpload]:
        """See `FileStore`."""
        folder = self.tenant_folder(tenant)
        folder.mkdir(parents=True, exist_ok=True)
        with FolderUpload(self, tenant, new_id()) as upload:
            yield upload

    def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """See `FileStore`."""
        if not is_id(file_id):
            return None
        path = self.path_of(tenant, file_id)
        try:
            known = msgspec.json.decode(_about(path).read_bytes(), type=StoredFile)
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        return msgspec.structs.replace(known, bytes=size)

    def open(self, tenant: str, file_id: str) -> BinaryIO:
        """See `FileStore`."""
        return self.path_of(tenant, file_id).open("rb")

    def delete(self, tenant: str, file_id: str) -> bool:
        """See `FileStore`."""
        if not is_id(file_id):
            return False
        path = self.path_of(tenant, file_id)
        try:
            _about(path).unlink()
        except FileNotFoundError:
            return False
        for ending in _BESIDE:
            path.with_name(path.name + ending).unlink(missing_ok=True)
        return True

    def list(self, tenant: str) -> Iterator[StoredFile]:
        """See `FileStore`."""
        for about in self.tenant_folder(tenant).glob(f"{PREFIX}*.json"):
            found = self.find(tenant, about.stem)
            if found is not None:
                yield found

    def path_of(self, tenant: str, file_id: str) -> Path:
        """See `FileStore`."""
        if not is_id(file_id):
            raise ValueError(f"{file_id!r} is no id of a file")
        return self.tenant_folder(tenant) / file_id

    def add(self, tenant: str, file: StoredFile) -> None:
        """See `FileStore`."""
        write_durably(_about(self.path_of(tenant, file.id)), msgspec.json.encode(file))


class FolderUpload:
    """Writes a file under another name, and renames it at the end."""

    def __init__(self, store: FolderStore, tenant: str, file_id: str) -> None:
        self.id = file_id
        self._store = store
        self._tenant = tenant
        self._path = store.path_of(tenant, file_id)
        self._part = self._path.with_name(self._path.name + _PART)

    def __enter__(self) -> Self:
        self._file = self._part.open("xb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def write(self, piece: bytes) -> None:
        """See `Upload`."""
        rest = memoryview(piece)
        while rest:
            rest = rest[self._file.write(rest) :]

    def commit(self, filename: str, purpose: str) -> StoredFile:
        """See `Upload`."""
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._part.rename(self._path)
        made = StoredFile(
            id=self.id,
            filename=filename,
            purpose=purpose,
            bytes=size,
            created_at=int(time.time()),
        )
        try:
            self._store.add(self._tenant, made)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        return made


def write_durably(path: Path, text: bytes, *, is_exclusive: bool = False) -> None:
    """Write a whole file at once, which then survives the loss of power.

    Replaces the one before, or with ``is_exclusive`` raises `FileExistsError`.
    """
    new = path.with_name(f"{path.name}.{os.urandom(8).hex()}{_PART}")
    try:
        with new.open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if is_exclusive:
            os.link(new, path)
        else:
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _about(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
