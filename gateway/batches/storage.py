"""Where files, batches and results lie: the seam behind which there is a folder or S3."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

S3_SCHEME: Final = "s3://"


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

    def upload(self, name: str) -> AbstractContextManager[Upload]:
        """Write an object piece by piece; without a commit nothing is left of it."""

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""

    def names(self, prefix: str) -> Mapping[str, int]:
        """The names in one folder that begin with a prefix, with the sizes of their objects."""

    def location(self, name: str) -> str:
        """Path or URL of an object, by which a batch worker finds it."""
