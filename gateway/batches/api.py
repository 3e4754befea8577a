"""The routes of files and batches. All state is in the folder and at RQ: any gateway serves it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.batches.asked import read_batch
from gateway.batches.files import StoredFile, no_file
from gateway.batches.folder import FolderStore
from gateway.batches.jobs import BatchJobs
from gateway.batches.records import BatchRecord, BatchRecords
from gateway.batches.upload import receive_upload
from gateway.http.errors import GatewayError
from gateway.http.incoming import parse_body, read_body
from gateway.http.sse import send_body
from gateway.responses.items import as_list, cut, read_query
from gateway.responses.tap import dump

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.http.principal import Principal
    from tokenyard.protocol.gateway_settings import GatewaySettings

FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
_PIECE: Final = 256 * 1024
#: OpenAI's usual and largest number of files on a page.
_FILES_ON_A_PAGE: Final = 10_000


def is_of_batches(path: str) -> bool:
    """Whether `BatchesApi` serves a path."""
    return path in (FILES, BATCHES) or path.startswith((FILES + "/", BATCHES + "/"))


def no_folder() -> GatewayError:
    """The error where no folder for files is set."""
    message = "this gateway keeps no files; its setting `files_dir` names a folder for them"
    return GatewayError(404, "not_found_error", message)


class BatchesApi:
    """Files of tenants, and batches over them. What blocks runs in threads."""

    def __init__(self, settings: GatewaySettings, folder: Path) -> None:
        self._settings = settings
        self._store = FolderStore(folder)
        self._records = BatchRecords(self._store)
        self._jobs = BatchJobs(self._store, settings.redis_url, settings.yard)

    async def serve(self, scope: Scope, receive: Receive, send: Send, principal: Principal) -> None:
        """Serve a request for files or batches; raises `GatewayError`."""
        path, method = scope["path"], scope["method"]
        try:
            await self._route(scope, receive, send, principal, method, path)
        except OSError as error:
            message = f"the file could not be stored or read: {error.strerror}"
            raise GatewayError(507, "server_error", message) from error

    async def _route(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        principal: Principal,
        method: str,
        path: str,
    ) -> None:
        tenant = principal.tenant
        match method, *path.removeprefix("/v1/").split("/"):
            case "POST", "files":
                limit = self._settings.max_file_bytes
                headers = Headers(scope=scope)
                made = await receive_upload(headers, receive, self._store, tenant, limit)
                await send_body(send, 200, dump(made.as_object()))
            case "GET", "files":
                query = read_query(scope["query_string"])
                await send_body(send, 200, await asyncio.to_thread(self._list_files, tenant, query))
            case "GET", "files", file_id:
                await send_body(send, 200, dump((await self._file(tenant, file_id)).as_object()))
            case "GET", "files", file_id, "content":
                await self._send_content(send, tenant, file_id)
            case "DELETE", "files", file_id:
                await asyncio.to_thread(self._delete, tenant, file_id)
                gone = {"id": file_id, "object": "file", "deleted": True}
                await send_body(send, 200, dump(gone))
            case "POST", "batches":
                body = parse_body(await read_body(receive, self._settings.max_body_bytes))
                key = Headers(scope=scope).get("idempotency-key")
                asked = read_batch(body, principal.client, key, int(time.time()))
                batch = await asyncio.to_thread(self._create, principal, asked)
                await send_body(send, 200, dump(batch))
            case "GET", "batches":
                query = read_query(scope["query_string"])
                listed = await asyncio.to_thread(self._list_batches, tenant, query)
                await send_body(send, 200, listed)
            case "GET", "batches", batch_id:
                batch = await asyncio.to_thread(self._describe, tenant, batch_id)
                await send_body(send, 200, dump(batch))
            case "POST", "batches", batch_id, "cancel":
                batch = await asyncio.to_thread(self._cancel, tenant, batch_id)
                await send_body(send, 200, dump(batch))
            case _:
                raise GatewayError(404, "not_found_error", f"there is no {method} {path}")

    # Files

    async def _file(self, tenant: str, file_id: str) -> StoredFile:
        found = await asyncio.to_thread(self._store.find, tenant, file_id)
        if found is None:
            raise no_file(file_id)
        return found

    def _list_files(self, tenant: str, query: dict[str, str]) -> bytes:
        found = [
            one
            for one in self._store.list(tenant)
            if "purpose" not in query or one.purpose == query["purpose"]
        ]
        found.sort(key=lambda one: (one.created_at, one.id))
        most = _FILES_ON_A_PAGE
        return as_list(*cut([one.as_object() for one in found], query, most, most))

    async def _send_content(self, send: Send, tenant: str, file_id: str) -> None:
        found = await self._file(tenant, file_id)
        try:
            content = await asyncio.to_thread(self._store.open, tenant, file_id)
        except FileNotFoundError as error:
            raise no_file(file_id) from error
        with content:
            await _send_file(send, content, found.bytes)

    def _delete(self, tenant: str, file_id: str) -> None:
        for record in self._records.list(tenant):
            if record.input_file_id == file_id and not self._jobs.is_over(tenant, record):
                message = f"the batch {record.id} reads this file; cancel it first"
                raise GatewayError(409, "conflict_error", message, param="file_id")
        if not self._store.delete(tenant, file_id):
            raise no_file(file_id)

    # Batches

    def _create(self, principal: Principal, asked: BatchRecord) -> dict[str, Any]:
        tenant = principal.tenant
        source = self._store.find(tenant, asked.input_file_id)
        if source is None:
            raise no_file(asked.input_file_id, "input_file_id")
        if source.purpose != "batch":
            message = f"input_file_id: the purpose of that file is {source.purpose!r}, not 'batch'"
            raise GatewayError(400, "invalid_request_error", message, param="input_file_id")
        record, is_new = self._records.open(tenant, asked)
        if not is_new and not record.asks_the_same(asked):
            message = "this idempotency key was used with another body; take a new key"
            raise GatewayError(422, "invalid_request_error", message, param="Idempotency-Key")
        if is_new or not self._jobs.is_known(tenant, record):
            try:
                self._jobs.submit(principal, record)
            except BaseException:
                self._records.delete(tenant, record)
                raise
        return self._jobs.describe(tenant, record)

    def _describe(self, tenant: str, batch_id: str) -> dict[str, Any]:
        return self._jobs.describe(tenant, self._record(tenant, batch_id))

    def _cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        record = self._record(tenant, batch_id)
        self._jobs.cancel(record)
        return self._jobs.describe(tenant, record)

    def _record(self, tenant: str, batch_id: str) -> BatchRecord:
        record = self._records.find(tenant, batch_id)
        if record is None:
            message = f"No batch found with id {batch_id[:80]!r}."
            raise GatewayError(404, "invalid_request_error", message, param="batch_id")
        return record

    def _list_batches(self, tenant: str, query: dict[str, str]) -> bytes:
        records = {one.id: one for one in self._records.list(tenant)}
        names = sorted(records, key=lambda name: (records[name].created_at, name))
        shown, has_more = cut([{"id": name} for name in names], query)
        data = [self._jobs.describe(tenant, records[one["id"]]) for one in shown]
        return as_list(data, has_more)


async def _send_file(send: Send, content: BinaryIO, size: int) -> None:
    """Send a file piece by piece, as many bytes as it had when it was looked up."""
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while size:
        piece = await asyncio.to_thread(content.read, min(size, _PIECE))
        if not piece:
            raise OSError("the file was cut while it was read")
        size -= len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
