"""Batches as jobs of RQ, which a `tokenyard batch worker` that reaches the same storage runs."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.batches.files import FileStore, StoredFile, name_of
from gateway.batches.parts import WholeOutputs
from gateway.batches.records import BatchRecord, read_window
from gateway.batches.storage import Storage
from gateway.http.errors import GatewayError
from gateway.http.principal import Principal
from tokenyard import clock
from tokenyard.batch.rq.jobs import (
    PERFORM_FOR_GATEWAYS,
    JobOrder,
    UnknownJob,
    batch_of,
    batch_queue,
    is_attended,
)
from tokenyard.batch.state import BATCH_TIMES, ENDED, Batch, BatchErrors, BatchSpec, BatchState
from tokenyard.protocol.keys import PriorityClass

#: A batch that RQ does not know after so long was never handed over.
_UNKNOWN_S: Final = 60.0
#: Ends after which the outputs may be in parts.
_BROKEN_OFF: Final = ENDED - {"completed"}
#: So long after its window a batch that nobody runs has expired; a worker would have said so.
_LATE_S: Final = 120.0


class BatchJobs:
    """The jobs of one yard's batches. All calls may block."""

    def __init__(self, storage: Storage, files: FileStore, url: str, yard: str) -> None:
        self._storage = storage
        self._files = files
        self._outputs = WholeOutputs(storage)
        self._url = url
        self._yard = yard

    def submit(self, principal: Principal, record: BatchRecord) -> None:
        """Hand a batch to RQ."""
        tenant = principal.tenant

        def location(file_id: str) -> str:
            return self._storage.location(name_of(tenant, file_id))

        spec = BatchSpec(
            input=location(record.input_file_id),
            output=location(record.output_file_id),
            errors=location(record.error_file_id),
            priority_class=_class_for(principal),
            completion_window_s=float(read_window(record.completion_window)),
            window_from=float(record.created_at),
            tenant=tenant,
            endpoint=record.endpoint,
            models=None if principal.models is None else sorted(principal.models),
        )
        with batch_queue(self._url, self._yard) as queue:
            queue.enqueue(JobOrder(spec=spec), job_id=record.id, function=PERFORM_FOR_GATEWAYS)

    def cancel(self, record: BatchRecord) -> None:
        """Cancel a batch; nothing happens to one that is over."""
        with batch_queue(self._url, self._yard) as queue, contextlib.suppress(UnknownJob):
            queue.cancel(queue.find(record.id))

    def is_over(self, tenant: str, record: BatchRecord) -> bool:
        """Whether no job reads or writes its files."""
        return self._progress(tenant, record).is_over

    def describe(self, tenant: str, record: BatchRecord) -> dict[str, Any]:
        """The batch object of OpenAI's API; the files of one that is over exist after this."""
        progress = self._progress(tenant, record)
        return {
            "id": record.id,
            "object": "batch",
            "endpoint": record.endpoint,
            "errors": _without_paths(progress.message),
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": progress.status,
            "output_file_id": self._publish(tenant, record, "output") if progress.is_over else None,
            "error_file_id": self._publish(tenant, record, "error") if progress.is_over else None,
            "created_at": record.created_at,
            "expires_at": record.ends_at,
            **{f"{name}_at": getattr(progress, f"{name}_at") for name in BATCH_TIMES},
            "request_counts": msgspec.to_builtins(progress.request_counts),
            "usage": msgspec.to_builtins(progress.usage),
            "metadata": record.metadata,
        }

    def is_known(self, tenant: str, record: BatchRecord) -> bool:
        """Whether it was handed to RQ; a gateway may have been killed just before that."""
        return self._find(tenant, record) is not None

    def _progress(self, tenant: str, record: BatchRecord) -> Batch:
        found = self._find(tenant, record)
        if found is None:
            is_late = clock.wall() - record.created_at >= _UNKNOWN_S
            return Batch(
                id=record.id,
                status="failed" if is_late else "validating",
                errors=BatchErrors.of("the batch is not known" if is_late else ""),
            )
        if found.status in _BROKEN_OFF and not self._outputs.are_whole(
            name_of(tenant, record.output_file_id), name_of(tenant, record.error_file_id)
        ):
            return replace(found, status="finalizing")
        return found

    def _find(self, tenant: str, record: BatchRecord) -> Batch | None:
        """As RQ tells it, or once RQ has forgotten the job, the state beside its output."""
        with batch_queue(self._url, self._yard) as queue, contextlib.suppress(UnknownJob):
            job = queue.find(record.id)
            found = batch_of(job)
            if found.rq_status == "started" and found.is_over:
                return replace(found, status="finalizing")  # its files are still being stored
            ends_at = record.ends_at
            is_late = clock.wall() > ends_at + _LATE_S
            if is_late and not found.is_over and not is_attended(job):
                return replace(found, status="expired", expired_at=ends_at)
            return found
        name = name_of(tenant, record.output_file_id)
        try:
            packed = self._storage.read(f"{name}.state")
        except FileNotFoundError:
            return None
        found = msgspec.json.decode(packed, type=BatchState).as_batch()
        # One that is not over was given up, and forgotten since.
        return found if found.is_over else replace(found, status="failed")

    def _publish(self, tenant: str, record: BatchRecord, role: str) -> str | None:
        """Make an output of a job a file of its tenant; None if it is empty, deleted or expired."""
        file_id = record.output_file_id if role == "output" else record.error_file_id
        found = self._storage.look(name_of(tenant, file_id))
        if found is None or not found.size:
            return None
        if self._files.find(tenant, file_id) is None:
            lifetime_s = record.output_expires_after_s
            expires_at = None if lifetime_s is None else found.modified_at + lifetime_s
            if expires_at is not None and expires_at <= clock.wall():
                return None
            file = StoredFile(
                id=file_id,
                filename=f"{record.id}_{role}.jsonl",
                purpose="batch_output",
                bytes=found.size,
                created_at=found.modified_at,
                expires_at=expires_at,
            )
            self._files.publish(tenant, file)
        return file_id


def _without_paths(message: str) -> dict[str, Any] | None:
    """The error of a batch; it names files by their paths here, which are not for clients."""
    if not message:
        return None
    names_only = re.sub(r"(?<![\w.])/(?:[^\s/:]+/)+", "", message)
    error = {"code": None, "line": None, "param": None, "message": names_only}
    return {"object": "list", "data": [error]}


def _class_for(principal: Principal) -> PriorityClass:
    """The lowest class; the best one for a key that may not use it."""
    try:
        return principal.choose_class({"service_tier": "flex"})
    except GatewayError:
        return principal.choose_class({})
