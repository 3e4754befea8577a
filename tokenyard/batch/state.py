"""The settings and the state of a batch job, in the terms of the OpenAI batch API.

The state is stored beside the output, in ``<output>.state``, and for jobs of RQ also in their
``meta``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from tokenyard import clock
from tokenyard.batch.files import UnreadableFile, check_codec, write_whole
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.keys import BATCH_PREFIX, PRIORITY_CLASSES, PriorityClass, is_tenant
from tokenyard.protocol.tenants import TENANT_RULE

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
#: Statuses of a job that is over until it is resumed.
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
#: Statuses whose times the batch object has, as ``completed_at``.
BATCH_TIMES: Final = tuple(status for status in get_args(Status) if status != "validating")
#: How long a request of a killed job can be submitted again without running again.
DEFAULT_RESULT_TTL_S: Final = 600
#: How often RQ retries a failed job after its last progress.
DEFAULT_RETRIES: Final = 5
_ENDS_BYTES: Final = 64 * 1024
TokenCount = Annotated[int, Meta(ge=0, le=2**53)]
_Instant = Annotated[int, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=2.0**40)]


class BatchSpec(Struct, frozen=True, kw_only=True):
    """The settings of a job; JSON in RQ.

    ``params`` and ``model`` are the defaults of its lines. Times are in seconds.
    """

    input: str
    output: str
    errors: str = ""  # "": beside the output
    model: str = ""
    params: dict[str, Any] = {}
    priority_class: PriorityClass = "low"
    window: int = 0  # most requests in flight; 0: by the workers' places
    ordered: bool = False
    completion_window_s: float = 0.0  # from `window_from`; 0: no bound
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    tenant: str = ""
    endpoint: str = ""  # of a gateway's batch: the URL of all its lines
    models: list[str] | None = None  # of a gateway's batch: only these; None: any
    window_from: float = 0.0  # unix seconds; 0: the first start

    @property
    def input_path(self) -> Path:
        """The file of requests."""
        return Path(self.input)

    @property
    def output_path(self) -> Path:
        """The file of results."""
        return Path(self.output)

    @property
    def errors_path(self) -> Path:
        """The file of errors: ``out.errors.jsonl.gz`` for ``out.jsonl.gz``."""
        if self.errors:
            return Path(self.errors)
        stem, dot, rest = self.output_path.name.partition(".")
        return self.output_path.with_name(f"{stem}.errors{dot}{rest}")

    @property
    def state_path(self) -> Path:
        """The file of the job's state."""
        return self.output_path.with_name(f"{self.output_path.name}.state")

    @property
    def log_path(self) -> Path:
        """The log file of a job of RQ."""
        return self.output_path.with_name(f"{self.output_path.name}.log")

    @property
    def window_text(self) -> str | None:
        """The completion window as the batch object has it."""
        return f"{self.completion_window_s:g}s" if self.completion_window_s else None

    def absolute(self) -> BatchSpec:
        """The same with absolute paths, for another process."""
        return msgspec.structs.replace(
            self,
            input=str(self.input_path.absolute()),
            output=str(self.output_path.absolute()),
            errors=str(self.errors_path.absolute()),
        )

    def check(self) -> None:
        """Raises `SettingsError` with all errors."""
        files = {
            "input": self.input_path,
            "output": self.output_path,
            "errors": self.errors_path,
            "the state of the job": self.state_path,
            "the log of the job": self.log_path,
        }
        errors = [
            f"{one} and {other}: {files[one]} and {files[other]} are the same file"
            for one, other in itertools.combinations(files, 2)
            if _is_same_file(files[one], files[other])
        ]
        if self.priority_class not in PRIORITY_CLASSES:
            errors.append(f"priority_class: use one of {', '.join(PRIORITY_CLASSES)}")
        if self.tenant and not is_tenant(self.tenant):
            errors.append(f"tenant {self.tenant!r}: {TENANT_RULE}")
        if self.window < 0:
            errors.append("window: must not be negative")
        if self.completion_window_s < 0:
            errors.append("completion_window_s: must not be negative")
        if self.result_ttl_s < 1:
            errors.append("result_ttl_s: must be at least 1")
        if errors:
            raise SettingsError(errors)
        for path in (self.input_path, self.output_path, self.errors_path):
            check_codec(path)


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, by links too, or would if it existed."""
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)


class RequestCounts(Struct, frozen=True):
    """Lines of the input, and how many have a result or an error."""

    total: TokenCount = 0
    completed: TokenCount = 0
    failed: TokenCount = 0

    @property
    def done(self) -> int:
        """Lines that have either."""
        return self.completed + self.failed

    @property
    def has_only_errors(self) -> bool:
        """Whether no line has a result."""
        return bool(self.failed) and not self.completed


class InputTokenDetails(Struct, frozen=True):
    """Prompt tokens that were in a prefix cache."""

    cached_tokens: TokenCount = 0


class OutputTokenDetails(Struct, frozen=True):
    """Generated tokens that were reasoning."""

    reasoning_tokens: TokenCount = 0


class BatchUsage(Struct, frozen=True):
    """Tokens of all results, as OpenAI's batch object has them."""

    input_tokens: TokenCount = 0
    input_tokens_details: InputTokenDetails = InputTokenDetails()
    output_tokens: TokenCount = 0
    output_tokens_details: OutputTokenDetails = OutputTokenDetails()
    total_tokens: TokenCount = 0

    def __str__(self) -> str:
        cached = self.input_tokens_details.cached_tokens
        of_cache = f" ({cached:,} cached)" if cached else ""
        return f"{self.input_tokens:,} in{of_cache}, {self.output_tokens:,} out"


class CodeCount(Struct):
    """The lines with one code of error."""

    code: str
    lines: int
    first_line: int


class InputMark(Struct, frozen=True):
    """Identifies an input file."""

    size: int
    digest: str  # of its first and last bytes

    @classmethod
    def of(cls, path: Path) -> InputMark:
        """The mark of a file; raises `UnreadableFile`."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                text = file.read(_ENDS_BYTES)
                file.seek(max(0, size - _ENDS_BYTES))
                text += file.read(_ENDS_BYTES)
        except OSError as error:
            raise UnreadableFile(f"{path}: {error.strerror or error}") from error
        return cls(size, hashlib.blake2b(text, digest_size=16).hexdigest())


class BatchError(Struct, frozen=True):
    """One error of a job as a whole."""

    message: str


class BatchErrors(Struct, frozen=True):
    """Why a job failed."""

    data: list[BatchError]
    object: str = "list"

    @classmethod
    def of(cls, message: str) -> BatchErrors | None:
        """One error; None without a message."""
        return cls([BatchError(message)]) if message else None


class Batch(Struct, frozen=True, kw_only=True):
    """The batch object of the OpenAI API, with what RQ adds; times are unix seconds.

    Its files are paths. Anybody who reaches the server may have written what it is read from.
    """

    id: str
    object: str = "batch"
    endpoint: str | None = None
    status: str
    rq_status: str | None = None
    input_file_id: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    created_at: _Instant = 0
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    line_errors: list[CodeCount] = []
    errors: BatchErrors | None = None
    completion_window: str | None = None
    expires_at: _Instant | None = None
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
    def message(self) -> str:
        """Why it failed."""
        return self.errors.data[0].message if self.errors and self.errors.data else ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended until it is resumed."""
        return self.status in ENDED


class BatchState(Struct, kw_only=True):
    """The state of a job; times are unix seconds."""

    id: str
    spec: BatchSpec
    input_mark: InputMark | None = None
    status: Status = "validating"
    #: Counts up each time that answered lines are opened again.
    round: int = 1
    counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    line_errors: list[CodeCount] = []
    #: When the job last entered each status.
    times: dict[str, float] = {}
    message: str = ""  # why it failed
    #: The last ``retry`` token, so that each opens the errors once.
    retried: str = ""

    def enter(self, status: Status, message: str = "") -> None:
        """Enter a status."""
        self.status = status
        self.message = message
        self.times[status] = clock.wall()

    @property
    def expires_at(self) -> float | None:
        """When its completion window ends; each round starts a new one."""
        if not self.spec.completion_window_s:
            return None
        return self.times["opened"] + self.spec.completion_window_s

    def save(self) -> None:
        """Write it beside the output."""
        packed = msgspec.json.format(msgspec.json.encode(self), indent=1)
        write_whole(self.spec.state_path, packed + b"\n")

    def as_batch(self, per_s: float | None = None, eta_s: float | None = None) -> Batch:
        """The batch object, with the pace of one that runs."""
        spec, times = self.spec, self.times
        times_at: Any = {f"{name}_at": int(times[name]) for name in BATCH_TIMES if name in times}
        return Batch(
            id=self.id,
            status=self.status,
            errors=BatchErrors.of(self.message),
            input_file_id=spec.input,
            output_file_id=spec.output,
            error_file_id=str(spec.errors_path),
            completion_window=spec.window_text,
            created_at=int(times.get("created", 0)),
            expires_at=int(self.expires_at) if self.expires_at else None,
            request_counts=self.counts,
            usage=self.usage,
            line_errors=self.line_errors,
            lines_per_s=None if per_s is None else round(per_s, 1),
            eta_s=None if eta_s is None else round(eta_s, 1),
            **times_at,
        )


def new_id() -> str:
    """An id for a job; also the name of the client that runs it."""
    return f"{BATCH_PREFIX}{secrets.token_hex(8)}"


def load_state(path: Path) -> BatchState | None:
    """The state in a file; None if there is no file. Raises `UnreadableFile`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UnreadableFile(f"{path}: not the state of a batch job: {error}") from error
