"""What can be done with batch jobs at RQ: cancel one, or resume one that is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from tokenyard.batch.rq import is_installed
from tokenyard.batch.state import ENDED, Batch
from tokenyard.broker.connection import batch_connection
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.protocol.errors import BadInput, Refused, SettingsError
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import cut, pip_install

if TYPE_CHECKING:
    from tokenyard.batch.rq.jobs import BatchQueue, KnownJob

_NAME: Final = 120

Job = Annotated[str, Field(noun="batch")]
RetryErrors = Annotated[bool, Field("Run lines with an error again")]


def queue_of(yard: Yard) -> BatchQueue:
    """The batch jobs of a yard; raises `Refused` without RQ."""
    if not is_installed():
        raise Refused(f"batch jobs run at RQ, which is not installed here: {pip_install('batch')}")
    from tokenyard.batch.rq.jobs import BatchQueue

    try:
        return BatchQueue(batch_connection(yard), yard.keys.yard)
    except SettingsError as error:
        raise Refused(str(error)) from error


def _find(yard: Yard, name: str) -> tuple[BatchQueue, KnownJob, Batch]:
    """The queue, and a job in it; raises `Refused`."""
    queue = queue_of(yard)
    from tokenyard.batch.rq.jobs import UnknownJob, batch_of

    try:
        known = queue.find(cut(name, _NAME))
        return queue, known, batch_of(known)
    except UnknownJob as error:
        raise Refused(str(error)) from error


def _preview_cancel(yard: Yard, _caller: Caller, *, job: str) -> Preview:
    _, _, batch = _find(yard, job)
    if batch.is_over:
        return Preview(f"{batch.id} is over: {batch.status}.", count=0)
    counts = batch.request_counts
    left = f"{counts.total - counts.done:,} lines" if counts.total else "Lines"
    return Preview(
        f"Cancel {batch.id}. Answers stay; {left} without one get the error batch_cancelled."
        " It can be resumed."
    )


@operation("batch.cancel", "Cancel a batch", _preview_cancel, is_dangerous=True)
def cancel(yard: Yard, _caller: Caller, *, job: Job) -> Outcome:
    """Cancel a batch job. Answers stay; each other line gets the error batch_cancelled.

    A running job is `cancelling` for a moment.
    """
    queue, known, _ = _find(yard, job)
    now = queue.cancel(known)
    if now not in {"cancelled", "cancelling"}:
        raise Refused(f"{known.id} had ended before: {now}")
    return Outcome(
        f"{known.id}: {now}", f"batch {known.id}", fields={"id": known.id, "status": now}
    )


def _preview_resume(yard: Yard, caller: Caller, *, job: str, **given: Any) -> Preview:
    del caller, given
    _, _, batch = _find(yard, job)
    if batch.status not in ENDED:
        return Preview(f"{batch.id} is not over: it is {batch.status}.", count=0)
    failed = batch.request_counts.failed
    if batch.status == "completed" and not failed:
        return Preview(f"{batch.id} is completed: there is nothing to resume.", count=0)
    return Preview(
        f"Resume {batch.id}: it waits for a worker again. Lines that are done keep their answers;"
        f" {failed:,} lines have an error."
    )


@operation("batch.resume", "Resume a batch", _preview_resume)
def resume(yard: Yard, _caller: Caller, *, job: Job, retry_errors: RetryErrors = False) -> Outcome:
    """Enqueue a job again that failed, expired or was cancelled.

    Lines that are done keep their answers. A completed job has only its errors left to run again,
    with --retry-errors.
    """
    from tokenyard.batch.rq.jobs import describe

    queue, known, _ = _find(yard, job)
    try:
        queue.resume(known, retry_errors=retry_errors)
    except SettingsError as error:
        raise BadInput(str(error)) from error
    again = ", with its errors" if retry_errors else ""
    text = f"{known.id} waits for a worker again{again}"
    return Outcome(text, f"batch {known.id}", fields=describe(known))


OPERATIONS: Final[tuple[Operation, ...]] = (cancel, resume)
