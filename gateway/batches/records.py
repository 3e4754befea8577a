"""Batches of tenants: what a client asks for by ``POST /v1/batches``, kept beside its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.batches import files
from gateway.batches.storage import Storage
from gateway.http.errors import GatewayError, invalid
from gateway.http.incoming import TRANSCRIBING
from gateway.http.records import durable_id
from gateway.responses.bodies import PATH as RESPONSES_URL
from tokenyard.batch.lines import CHAT_URL, COMPLETIONS_URL
from tokenyard.protocol.keys import BATCH_PREFIX

_ID: Final = re.compile(BATCH_PREFIX + "[0-9a-f]{32}")
_ENDING: Final = ".json"
ENDPOINTS: Final = (
    *(CHAT_URL, COMPLETIONS_URL, RESPONSES_URL),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", *TRANSCRIBING),
)
#: Seconds after which a file may expire, as OpenAI has them.
LIFETIMES_S: Final = range(3600, 30 * 86_400 + 1)
#: Metadata within OpenAI's limits.
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
_Metadata = Annotated[dict[_Key, _Value], Meta(max_length=16)]
#: Where a field of the body is at fault, as msgspec's errors end.
_PLACE: Final = re.compile(r" - at (`key` in )?`\$\.(?P<field>\w+)[^`]*`$")
_WINDOW: Final = re.compile(r"(?P<count>[0-9]{1,7})(?P<unit>[smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S: Final = 30 * 86400


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

    @property
    def ends_at(self) -> int:
        """When its window ends, in unix seconds."""
        return self.created_at + read_window(self.completion_window)

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
        for name in self._storage.names(files.name_in(tenant, BATCH_PREFIX)):
            found = self.find(tenant, name.rpartition("/")[2].removesuffix(_ENDING))
            if found is not None:
                yield found

    def delete(self, tenant: str, record: BatchRecord) -> None:
        """Forget a batch."""
        self._storage.delete(_name(tenant, record.id))


def _name(tenant: str, batch_id: str) -> str:
    return files.name_in(tenant, batch_id + _ENDING)


class _Lifetime(Struct, forbid_unknown_fields=True):
    """How long the outputs exist."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=LIFETIMES_S[0], le=LIFETIMES_S[-1])]


class _Asked(Struct, forbid_unknown_fields=True):
    """The body that asks for one."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: _Metadata | None = None
    output_expires_after: _Lifetime | None = None


def read_batch(body: dict[str, Any], client: str, key: str | None, now: int) -> BatchRecord:
    """The batch of a body, named by the idempotency key if there is one; raises `GatewayError`."""
    try:
        asked = msgspec.convert(body, _Asked)
    except msgspec.ValidationError as error:
        raise _fault(str(error)) from error
    if asked.endpoint not in ENDPOINTS:
        batches = f"batches are for {', '.join(ENDPOINTS)}"
        raise invalid("endpoint", f"{batches}, not {asked.endpoint[:80]!r}")
    read_window(asked.completion_window)
    lifetime = asked.output_expires_after
    return BatchRecord(
        id=BATCH_PREFIX + durable_id(client, None if key is None else f"batch/{key}"),
        input_file_id=asked.input_file_id,
        endpoint=asked.endpoint,
        completion_window=asked.completion_window,
        created_at=now,
        metadata=asked.metadata,
        output_expires_after_s=None if lifetime is None else lifetime.seconds,
    )


def _fault(text: str) -> GatewayError:
    """The error of a body in msgspec's words, by the field; it may repeat what the client wrote."""
    if found := _PLACE.search(text):
        name, message = found["field"], text[: found.start()]
    else:  # a field is missing or unknown
        name, message = text.partition("`")[2].rstrip("`"), text
    return invalid(name[:80], message[:200])


def read_window(text: str) -> int:
    """Seconds of a window like ``24h``; raises `GatewayError`."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found["count"]) * _UNITS[found["unit"]] if found else 0
    if not 0 < seconds <= _LONGEST_S:
        message = "give a time like `24h`, `90m` or `7d`, of 30 days at most"
        raise invalid("completion_window", message)
    return seconds
