"""Files of tenants, and the seam behind which they are stored."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from msgspec import Struct

from gateway.http.errors import GatewayError

PREFIX: Final = "file-"
_ID: Final = re.compile(PREFIX + "[0-9a-f]{32}")
#: Longest name of a file that is kept; it is only shown.
MAX_FILENAME: Final = 255


class StoredFile(Struct, frozen=True, kw_only=True):
    """What is known of a file beside its content."""

    id: str
    filename: str
    purpose: str
    bytes: int = 0
    created_at: int = 0  # unix seconds

    def as_object(self) -> dict[str, Any]:
        """The file object of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Upload(Protocol):
    """A file that does not exist yet."""

    id: str

    def write(self, piece: bytes) -> None:
        """Add a piece of the content."""

    def commit(self, filename: str, purpose: str) -> StoredFile:
        """Make the file exist, whole and durable."""


class FileStore(Protocol):
    """Stores the files of each tenant apart. All calls may block; ids are checked by `is_id`."""

    def put(self, tenant: str) -> AbstractContextManager[Upload]:
        """Write a new file; without a commit nothing is left of it."""

    def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """A file of a tenant."""

    def open(self, tenant: str, file_id: str) -> BinaryIO:
        """Its content; raises `FileNotFoundError`."""

    def delete(self, tenant: str, file_id: str) -> bool:
        """Delete a file; False where there was none."""

    def list(self, tenant: str) -> Iterator[StoredFile]:
        """All files of a tenant, in any order."""

    def path_of(self, tenant: str, file_id: str) -> Path:
        """Where a batch job reads or writes a file, whether it exists or not."""

    def add(self, tenant: str, file: StoredFile) -> None:
        """Make a file exist that a batch job has written to its path."""


def new_id() -> str:
    """An id for a file."""
    return PREFIX + secrets.token_hex(16)


def is_id(text: str) -> bool:
    """Whether this can be the id of a file; what is none never becomes a path."""
    return _ID.fullmatch(text) is not None


def no_file(file_id: str, param: str = "file_id") -> GatewayError:
    """The error for an id that names no file of this tenant."""
    message = f"No such File object: {file_id[:80]!r}"
    return GatewayError(404, "invalid_request_error", message, param=param)
