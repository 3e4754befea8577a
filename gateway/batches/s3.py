"""A bucket of S3, or of what speaks its API; obstore takes endpoint and keys from ``AWS_*``."""

from __future__ import annotations

import contextlib
import datetime
import errno
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from gateway.batches.storage import S3_SCHEME, Stored
from tokenyard.protocol.errors import SettingsError

if TYPE_CHECKING:
    from obstore import WritableFile
    from obstore.store import RetryConfig

#: Of a multipart upload; three are in memory at most.
_PART_BYTES: Final = 8 * 1024 * 1024
_RETRY: Final[RetryConfig] = {"max_retries": 5, "retry_timeout": datetime.timedelta(seconds=30)}


class S3Storage:
    """Objects below a prefix of a bucket: ``s3://bucket/prefix``."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        bucket, _, prefix = self._url.removeprefix(S3_SCHEME).partition("/")
        with _as_os_errors():
            self._store = S3Store(bucket, prefix=prefix or None, retry_config=_RETRY)

    def start(self) -> None:
        """See `Storage`."""
        try:
            with _as_os_errors():
                next(iter(obstore.list(self._store, chunk_size=1)), None)
        except OSError as error:
            message = f"files_url: {self._url} cannot be used: {error.strerror}"
            raise SettingsError([message]) from error

    def read(self, name: str) -> bytes:
        """See `Storage`."""
        with _as_os_errors():
            return bytes(obstore.get(self._store, name).bytes())

    def pieces(self, name: str) -> Generator[bytes, None, None]:
        """See `Storage`."""
        with _as_os_errors():
            for piece in obstore.get(self._store, name).stream():
                yield bytes(piece)

    def look(self, name: str) -> Stored | None:
        """See `Storage`."""
        try:
            with _as_os_errors():
                found = obstore.head(self._store, name)
        except FileNotFoundError:
            return None
        return Stored(found["size"], int(found["last_modified"].timestamp()))

    def write(self, name: str, content: bytes, *, is_exclusive: bool = False) -> None:
        """See `Storage`."""
        with _as_os_errors():
            obstore.put(
                self._store,
                name,
                content,
                mode="create" if is_exclusive else "overwrite",
                use_multipart=False,
            )

    def upload(self, name: str) -> _BucketUpload:
        """See `Storage`."""
        return _BucketUpload(self._store, name)

    def delete(self, name: str) -> None:
        """See `Storage`."""
        with _as_os_errors():
            obstore.delete(self._store, name)

    def names(self, prefix: str) -> Mapping[str, int]:
        """See `Storage`."""
        with _as_os_errors():
            found = obstore.list_with_delimiter(self._store, prefix.rpartition("/")[0])
        sizes = {one["path"]: one["size"] for one in found["objects"]}
        return {name: size for name, size in sizes.items() if name.startswith(prefix)}

    def location(self, name: str) -> str:
        """See `Storage`."""
        return f"{self._url}/{name}"

    def fetch(self, name: str, path: Path) -> None:
        """Copy an object to a file."""
        pieces = self.pieces(name)
        first = next(pieces, b"")  # where there is no object, there is no file
        with path.open("wb") as file:
            file.write(first)
            file.writelines(pieces)

    def store(self, path: Path, name: str) -> None:
        """Copy a file to an object, which exists once it is whole."""
        with _as_os_errors():
            obstore.put(self._store, name, path)


class _BucketUpload:
    """A multipart upload, or one request where the object is small.

    One that is not committed is never an object. Its parts stay in the bucket, out of sight, until
    a lifecycle rule removes them.
    """

    def __init__(self, store: S3Store, name: str) -> None:
        self._store = store
        self._name = name
        self._size = 0
        self._file: WritableFile

    def __enter__(self) -> Self:
        with _as_os_errors():
            self._file = obstore.open_writer(
                self._store, self._name, buffer_size=_PART_BYTES, max_concurrency=2
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: to close the file would make it exist."""

    def write(self, piece: bytes) -> None:
        """See `Upload`."""
        with _as_os_errors():
            self._file.write(piece)
        self._size += len(piece)

    def commit(self) -> int:
        """See `Upload`."""
        with _as_os_errors():
            self._file.close()
        return self._size


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Errors of obstore as those of files; its `FileNotFoundError` is one already."""
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(errno.EEXIST, _first_line(error)) from error
    except BaseError as error:
        raise OSError(errno.EIO, _first_line(error)) from error


def _first_line(error: BaseError) -> str:
    """What happened, without obstore's story of its attempts."""
    return str(error).partition("\n")[0]
