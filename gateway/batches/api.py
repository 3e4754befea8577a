"""The routes of files and batches. All state is in the storage and at RQ: any gateway serves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers
from starlette.types import Receive, Send

from gateway.batches.files import FileStore, StoredFile, no_file
from gateway.batches.jobs import BatchJobs
from gateway.batches.records import BatchRecord, BatchRecords, read_batch
from gateway.batches.storage import Storage
from gateway.batches.upload import expected_bytes, receive_upload
from gateway.http.errors import GatewayError
from gateway.http.incoming import Bodies, require_json
from gateway.http.records import key_reused
from gateway.http.routes import Call, Handler, Routes, as_list, cut, page
from tokenyard import clock
from tokenyard.protocol.errors import Code

if TYPE_CHECKING:
    from gateway.http.principal import Principal
    from tokenyard.protocol.gateway_settings import GatewaySettings

routes = Routes()
#: OpenAI's usual and largest number of files on a page.
_FILES_ON_A_PAGE: Final = 10_000


def no_storage(_name: str) -> Handler:
    """The handler of all routes where no place for files is set."""

    async def refuse(_call: Call) -> None:
        message = "this gateway keeps no files; its setting `files_dir` or `files_url` says where"
        raise GatewayError(404, message)

    return refuse


class BatchesApi:
    """Files of tenants, and batches over them. What blocks runs in threads."""

    def __init__(self, settings: GatewaySettings, storage: Storage, bodies: Bodies) -> None:
        self._settings = settings
        self._bodies = bodies
        self._files = FileStore(storage)
        self._records = BatchRecords(storage)
        #: Bytes of the files that tenants are sending to this gateway.
        self._coming: defaultdict[str, list[int]] = defaultdict(list)
        self._jobs = BatchJobs(storage, self._files, settings.redis_url, settings.yard)

    def handler(self, name: str) -> Handler:
        """The handler of this name; without room for files it answers 507."""
        handle: Handler = getattr(self, name)

        async def answer(call: Call) -> None:
            try:
                await handle(call)
            except OSError as error:
                message = f"the file could not be stored or read: {error.strerror}"
                raise GatewayError(507, message) from error

        return answer

    # Files

    @routes("POST /v1/files", "files", answer="FileObject", takes=("file_form",))
    async def create_file(self, call: Call) -> None:
        """Store a file."""
        made = await self._upload(call.headers, call.receive, call.principal.tenant)
        await call.answer(made.as_object())

    @routes("GET /v1/files", "files", answer="FilePage", takes=("file_page",))
    async def list_files(self, call: Call) -> None:
        """List the tenant's files."""
        listing = asyncio.to_thread(self._list_files, call.principal.tenant, call.query)
        await call.answer(await listing)

    @routes("GET /v1/files/{file_id}", "files", answer="FileObject")
    async def retrieve_file(self, call: Call) -> None:
        """Describe a file."""
        await call.answer((await self._file(call)).as_object())

    @routes("DELETE /v1/files/{file_id}", "files", answer="Deleted")
    async def delete_file(self, call: Call) -> None:
        """Delete a file that no batch under way reads."""
        file_id = call.params["file_id"]
        await asyncio.to_thread(self._delete, call.principal.tenant, file_id)
        await call.answer({"id": file_id, "object": "file", "deleted": True})

    @routes("GET /v1/files/{file_id}/content", "files", media_type="application/octet-stream")
    async def download_file(self, call: Call) -> None:
        """Read the content of a file."""
        found = await self._file(call)
        with contextlib.closing(self._files.pieces(call.principal.tenant, found.id)) as pieces:
            try:
                first = await asyncio.to_thread(next, pieces, b"")
            except FileNotFoundError as error:
                raise no_file(found.id) from error
            await _send_file(call.send, first, pieces, found.bytes)

    async def _upload(self, headers: Headers, receive: Receive, tenant: str) -> StoredFile:
        limit = self._settings.max_file_bytes
        size = expected_bytes(headers, limit)
        coming = self._coming[tenant]
        coming.append(size)
        try:
            await asyncio.to_thread(self._check_quota, tenant, len(coming), sum(coming))
            return await receive_upload(headers, receive, self._files, tenant, limit)
        finally:
            coming.remove(size)
            if not coming:
                self._coming.pop(tenant, None)

    def _check_quota(self, tenant: str, count: int, size: int) -> None:
        """Raises `GatewayError` where a tenant has no room for so many files and bytes more."""
        most, most_bytes = self._settings.max_tenant_files, self._settings.max_tenant_bytes
        files, used = self._files.used(tenant)
        if files + count > most or used + size > most_bytes:
            message = (
                f"a tenant may have {most} files of {most_bytes} bytes together, and its batches"
                " write two each: delete some; those that have expired go when files are listed"
            )
            code = Code.QUOTA_EXCEEDED
            raise GatewayError(413, message, param="file", code=code)

    async def _file(self, call: Call) -> StoredFile:
        file_id = call.params["file_id"]
        found = await asyncio.to_thread(self._files.find, call.principal.tenant, file_id)
        if found is None:
            raise no_file(file_id)
        return found

    def _list_files(self, tenant: str, query: dict[str, str]) -> dict[str, Any]:
        known = list(self._files.list(tenant))
        self._remove(tenant, [one.id for one in known if one.is_expired])
        found = [
            one
            for one in known
            if not one.is_expired and query.get("purpose", one.purpose) == one.purpose
        ]
        found.sort(key=lambda one: (one.created_at, one.id))
        most = _FILES_ON_A_PAGE
        return page([one.as_object() for one in found], query, most, most)

    def _remove(self, tenant: str, expired: list[str]) -> None:
        """Remove files that have expired, but those that a batch still reads."""
        for file_id in expired:
            if self._reader_of(tenant, file_id) is None:
                self._files.remove(tenant, file_id)

    def _delete(self, tenant: str, file_id: str) -> None:
        reader = self._reader_of(tenant, file_id)
        if reader is not None:
            message = f"the batch {reader.id} reads this file; cancel it first"
            raise GatewayError(409, message, param="file_id")
        if not self._files.delete(tenant, file_id):
            raise no_file(file_id)

    def _reader_of(self, tenant: str, file_id: str) -> BatchRecord | None:
        """A batch that is not over and has this file as its input."""
        for record in self._records.list(tenant):
            if record.input_file_id == file_id and not self._jobs.is_over(tenant, record):
                return record
        return None

    # Batches

    @routes(
        "POST /v1/batches",
        "batches",
        body="NewBatch",
        answer="Batch",
        takes=("batch_headers",),
    )
    async def create_batch(self, call: Call) -> None:
        """Begin a batch over the lines of a file."""
        require_json(call.headers)
        client = call.principal.client
        raw = await self._bodies.read(call.receive, client)
        body = (await self._bodies.parse(raw, client)).value
        asked = read_batch(body, client, call.headers.get("idempotency-key"), int(clock.wall()))
        await call.answer(await asyncio.to_thread(self._create, call.principal, asked))

    @routes("GET /v1/batches", "batches", answer="BatchPage", takes=("page",))
    async def list_batches(self, call: Call) -> None:
        """List the tenant's batches."""
        listing = asyncio.to_thread(self._list_batches, call.principal.tenant, call.query)
        await call.answer(await listing)

    @routes("GET /v1/batches/{batch_id}", "batches", answer="Batch")
    async def retrieve_batch(self, call: Call) -> None:
        """Describe a batch."""
        await call.answer(await asyncio.to_thread(self._describe, call))

    @routes("POST /v1/batches/{batch_id}/cancel", "batches", answer="Batch")
    async def cancel_batch(self, call: Call) -> None:
        """Cancel a batch; lines without a result get an error."""
        await call.answer(await asyncio.to_thread(self._cancel, call))

    def _create(self, principal: Principal, asked: BatchRecord) -> dict[str, Any]:
        tenant = principal.tenant
        source = self._files.find(tenant, asked.input_file_id)
        if source is None:
            raise no_file(asked.input_file_id, "input_file_id")
        if source.purpose != "batch":
            message = f"input_file_id: the purpose of that file is {source.purpose!r}, not 'batch'"
            raise GatewayError(400, message, param="input_file_id")
        if self._records.find(tenant, asked.id) is None:
            self._check_quota(tenant, 2, 0)  # its results and its errors
        record, is_new = self._records.open(tenant, asked)
        if not is_new and not record.asks_the_same(asked):
            raise key_reused()
        if is_new or not self._jobs.is_known(tenant, record):
            try:
                self._jobs.submit(principal, record)
            except BaseException:
                self._records.delete(tenant, record)
                raise
        return self._jobs.describe(tenant, record)

    def _describe(self, call: Call) -> dict[str, Any]:
        return self._jobs.describe(call.principal.tenant, self._record(call))

    def _cancel(self, call: Call) -> dict[str, Any]:
        record = self._record(call)
        self._jobs.cancel(record)
        return self._jobs.describe(call.principal.tenant, record)

    def _record(self, call: Call) -> BatchRecord:
        batch_id = call.params["batch_id"]
        record = self._records.find(call.principal.tenant, batch_id)
        if record is None:
            message = f"No batch found with id {batch_id[:80]!r}."
            raise GatewayError(404, message, param="batch_id", kind="invalid_request_error")
        return record

    def _list_batches(self, tenant: str, query: dict[str, str]) -> dict[str, Any]:
        records = {one.id: one for one in self._records.list(tenant)}
        names = sorted(records, key=lambda name: (records[name].created_at, name))
        shown, has_more = cut([{"id": name} for name in names], query)
        data = [self._jobs.describe(tenant, records[one["id"]]) for one in shown]
        return as_list(data, has_more)


async def _send_file(send: Send, piece: bytes, pieces: Iterator[bytes], size: int) -> None:
    """Send a file piece by piece, as many bytes as it had when it was looked up."""
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while size:
        if not piece:
            raise OSError("the file was cut while it was read")
        piece = piece[:size]
        size -= len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        if size:
            piece = await asyncio.to_thread(next, pieces, b"")
    await send({"type": "http.response.body", "body": b""})
