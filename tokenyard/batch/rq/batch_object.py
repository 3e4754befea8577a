"""The batch object of a job at RQ, validated: whoever reaches the server may have written it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tokenyard.batch.state import ENDED, BatchUsage, TokenCount

_Instant = Annotated[int, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=2.0**40)]


class Counts(Struct, frozen=True):
    """Lines of a job's input, and how many have a result or an error."""

    total: TokenCount = 0
    completed: TokenCount = 0
    failed: TokenCount = 0

    @property
    def done(self) -> int:
        """Lines that have either."""
        return self.completed + self.failed


class Message(Struct, frozen=True):
    """One error of a job as a whole."""

    message: str


class Messages(Struct, frozen=True):
    """Why a job failed, in OpenAI's form."""

    data: list[Message]
    object: str = "list"


class Batch(Struct, frozen=True, kw_only=True):
    """The batch object of a job, in OpenAI's form and with what RQ adds; times are unix seconds."""

    id: str
    object: str = "batch"
    status: str
    rq_status: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    created_at: _Instant
    request_counts: Counts = Counts()
    usage: BatchUsage | None = None
    errors: Messages | None = None
    completion_window: str | None = None
    in_progress_at: _Instant | None = None
    finalizing_at: _Instant | None = None
    completed_at: _Instant | None = None
    failed_at: _Instant | None = None
    expired_at: _Instant | None = None
    cancelling_at: _Instant | None = None
    cancelled_at: _Instant | None = None
    lines_per_s: _Seconds | None = None
    eta_s: _Seconds | None = None
    retries_left: int | None = None
    cron: str | None = None

    @property
    def counts(self) -> Counts:
        """Its lines; zeros while they are not known."""
        return self.request_counts

    @property
    def message(self) -> str:
        """Why it failed."""
        return self.errors.data[0].message if self.errors and self.errors.data else ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended until it is resumed."""
        return self.status in ENDED
