"""Batches of tenants, beside their files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct

from gateway.batches import files
from gateway.batches.storage import Storage
from tokenyard.protocol.keys import BATCH_PREFIX

PREFIX: Final = BATCH_PREFIX
_ID: Final = re.compile(PREFIX + "[0-9a-f]{32}")
_ENDING: Final = ".json"


class BatchRecord(Struct, frozen=True, kw_only=True):
    """What a client asked for; how far it is, RQ and the job's own files tell."""

    id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int  # unix seconds
    metadata: dict[str, str] | None = None
    #: How long its files exist from their creation; None: until they are deleted.
    output_expires_after_s: int | None = None

    @property
    def output_file_id(self) -> str:
        """The file of results. It exists for clients once the batch is over."""
        return self._file("output")

    @property
    def error_file_id(self) -> str:
        """The file of errors, likewise."""
        return self._file("error")

    def _file(self, role: str) -> str:
        digest = blake2b(f"{self.id}/{role}".encode(), digest_size=16)
        return files.PREFIX + digest.hexdigest()

    def asks_the_same(self, other: BatchRecord) -> bool:
        """Whether two records differ by their time at most."""
        return msgspec.structs.replace(self, created_at=other.created_at) == other


class BatchRecords:
    """The records of all tenants. All calls may block."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def open(self, tenant: str, record: BatchRecord) -> tuple[BatchRecord, bool]:
        """The record under this id, and whether it is new."""
        packed = msgspec.json.encode(record)
        try:
            self._storage.write(_name(tenant, record.id), packed, is_exclusive=True)
        except FileExistsError:
            known = self.find(tenant, record.id)
            if known is not None:
                return known, False
            raise
        return record, True

    def find(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """A batch of a tenant."""
        if _ID.fullmatch(batch_id) is None:
            return None
        try:
            packed = self._storage.read(_name(tenant, batch_id))
        except FileNotFoundError:
            return None
        return msgspec.json.decode(packed, type=BatchRecord)

    def list(self, tenant: str) -> Iterator[BatchRecord]:
        """All batches of a tenant, in any order."""
        for name in self._storage.names(files.name_in(tenant, PREFIX)):
            found = self.find(tenant, name.rpartition("/")[2].removesuffix(_ENDING))
            if found is not None:
                yield found

    def delete(self, tenant: str, record: BatchRecord) -> None:
        """Forget a batch."""
        self._storage.delete(_name(tenant, record.id))


def _name(tenant: str, batch_id: str) -> str:
    return files.name_in(tenant, batch_id + _ENDING)
