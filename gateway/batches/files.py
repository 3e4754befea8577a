"""Files of tenants.

    tenant-<name>/<file id>         the content
    tenant-<name>/<file id>.json    what is known of it; written last: now it exists
    tenant-<name>/<batch id>.json   a batch, see `records`

Names come from ids, which are checked, and from tenants, which are quoted; never from clients.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from gateway.batches.parts import beside
from gateway.batches.storage import S3_SCHEME, FolderStorage, Storage, Upload
from gateway.http.errors import GatewayError
from tokenyard import clock
from tokenyard.process.extras import how_to_install
from tokenyard.protocol.errors import SettingsError

if TYPE_CHECKING:
    from gateway.batches.s3 import S3Storage

PREFIX: Final = "file-"
_ID: Final = re.compile(PREFIX + "[0-9a-f]{32}")
#: Longest name of a file that is kept; it is only shown.
MAX_FILENAME: Final = 255
_ABOUT: Final = ".json"
#: The content, and the log of the job that wrote it; its state stays, for the batch's counts.
_BESIDE: Final = ("", ".log")
#: Descriptions that are read at once.
_READERS: Final = 16


class StoredFile(Struct, frozen=True, kw_only=True):
    """What is known of a file beside its content."""

    id: str
    filename: str
    purpose: str
    bytes: int = 0
    created_at: int = 0  # unix seconds
    expires_at: int | None = None  # likewise; None: never

    @property
    def is_expired(self) -> bool:
        """Whether nobody can use it any more."""
        return self.expires_at is not None and self.expires_at <= clock.wall()

    def as_object(self) -> dict[str, Any]:
        """The file object of OpenAI's API."""
        same = {"object": "file", "status": "processed", "status_details": None}
        return msgspec.structs.asdict(self) | same


class FileStore:
    """Stores the files of each tenant apart. All calls may block."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @contextlib.contextmanager
    def put(self, tenant: str) -> Iterator[NewFile]:
        """Write a new file; without a commit nothing is left of it."""
        file_id = new_id()
        with self._storage.upload(name_of(tenant, file_id)) as upload:
            yield NewFile(self, tenant, file_id, upload)

    def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """A file of a tenant, unless it has expired."""
        found = self._read(tenant, file_id)
        return None if found is None or found.is_expired else found

    def _read(self, tenant: str, file_id: str) -> StoredFile | None:
        if not is_id(file_id):
            return None
        name = name_of(tenant, file_id)
        try:
            known = msgspec.json.decode(self._storage.read(name + _ABOUT), type=StoredFile)
        except FileNotFoundError:
            return None
        content = self._storage.look(name)
        return None if content is None else msgspec.structs.replace(known, bytes=content.size)

    def pieces(self, tenant: str, file_id: str) -> Generator[bytes, None, None]:
        """The content of a file; raises `FileNotFoundError` before the first piece."""
        return self._storage.pieces(name_of(tenant, file_id))

    def content(self, tenant: str, file_id: str, most_bytes: int) -> bytes:
        """The whole content of a file; raises `GatewayError` where it is not there or larger."""
        found = self.find(tenant, file_id)
        if found is None:
            raise no_file(file_id)
        if found.bytes > most_bytes:
            raise GatewayError(400, f"{file_id} is too large: {most_bytes} bytes are left for it")
        return b"".join(self.pieces(tenant, file_id))

    def delete(self, tenant: str, file_id: str) -> bool:
        """Delete a file; False where there was none."""
        if self.find(tenant, file_id) is None:
            return False
        self.remove(tenant, file_id)
        return True

    def remove(self, tenant: str, file_id: str) -> None:
        """Remove what is left of a file."""
        name = name_of(tenant, file_id)
        own = [name + ending for ending in (_ABOUT, *_BESIDE)]
        for one in [*own, *beside(self._storage, name)]:
            self._storage.delete(one)

    def list(self, tenant: str) -> Iterator[StoredFile]:
        """All files of a tenant in any order, also those that have expired."""
        names = self._storage.names(name_in(tenant, PREFIX))
        ids = [name.rpartition("/")[2].removesuffix(_ABOUT) for name in names]
        with ThreadPoolExecutor(_READERS) as readers:
            for found in readers.map(lambda one: self._read(tenant, one), set(ids)):
                if found is not None:
                    yield found

    def used(self, tenant: str) -> tuple[int, int]:
        """How many files a tenant has, and the bytes of all that is stored of them."""
        sizes = self._storage.names(name_in(tenant, PREFIX))
        return sum(name.endswith(_ABOUT) for name in sizes), sum(sizes.values())

    def publish(self, tenant: str, file: StoredFile) -> None:
        """Make a file exist whose content is there, as a batch job writes it."""
        self._storage.write(name_of(tenant, file.id) + _ABOUT, msgspec.json.encode(file))


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that does not exist yet."""

    store: FileStore
    tenant: str
    id: str
    upload: Upload  # its content

    def commit(self, filename: str, purpose: str, expires_after_s: int | None = None) -> StoredFile:
        """Make the file exist."""
        size, now = self.upload.commit(), int(clock.wall())
        made = StoredFile(
            id=self.id,
            filename=filename,
            purpose=purpose,
            bytes=size,
            created_at=now,
            expires_at=None if expires_after_s is None else now + expires_after_s,
        )
        try:
            self.store.publish(self.tenant, made)
        except BaseException:
            self.store.remove(self.tenant, self.id)
            raise
        return made


def new_id() -> str:
    """An id for a file."""
    return PREFIX + secrets.token_hex(16)


def is_id(text: str) -> bool:
    """Whether this can be the id of a file; what is none never becomes a name in the storage."""
    return _ID.fullmatch(text) is not None


def name_of(tenant: str, file_id: str) -> str:
    """Where the content of a file lies; raises `ValueError` for what is no id."""
    if not is_id(file_id):
        raise ValueError(f"{file_id!r} is no id of a file")
    return name_in(tenant, file_id)


def name_in(tenant: str, rest: str) -> str:
    """A name of a tenant; `quote` leaves no separator, and the prefix no dots alone."""
    return f"tenant-{quote(tenant, safe='')}/{rest}"


def no_file(file_id: str, param: str = "file_id") -> GatewayError:
    """The error for an id that names no file of this tenant."""
    message = f"No such File object: {file_id[:80]!r}"
    return GatewayError(404, message, param=param, kind="invalid_request_error")


def open_storage(files_dir: Path | None, files_url: str) -> Storage | None:
    """The storage that the settings name; None where they name none."""
    if files_url:
        return open_bucket(files_url)
    if files_dir is not None:
        return FolderStorage(files_dir)
    return None


def storage_of(location: str) -> Storage:
    """The storage of an object, from where it lies (`Storage.location`)."""
    root = location.rsplit("/", 2)[0] or "/"  # `name_in` has two parts
    return open_bucket(root) if root.startswith(S3_SCHEME) else FolderStorage(Path(root))


def open_bucket(url: str) -> S3Storage:
    """The storage of a URL; raises `SettingsError` where the extra for it is missing."""
    try:
        from gateway.batches.s3 import S3Storage
    except ImportError as error:
        raise SettingsError([f"{url}: {how_to_install(error) or error}"]) from error
    return S3Storage(url)
