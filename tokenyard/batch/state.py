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
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from tokenyard import clock
from tokenyard.batch.files import UnreadableFile, check_codec, is_compressed, write_whole
from tokenyard.batch.tables import NewColumns, check_columns, columns_of, table_files
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.keys import BATCH_PREFIX, PRIORITY_CLASSES, PriorityClass, is_tenant
from tokenyard.protocol.tenants import TENANT_RULE
from tokenyard.protocol.wire import GENERATE, Task

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
#: The columns of a table that get the answers, by the task. A score needs a query for each row.
_NEW_COLUMNS: Final[Mapping[Task, NewColumns]] = {
    "generate": NewColumns("generated_text", 0),
    "embed": NewColumns("embedding", 1),
    "classify": NewColumns("probs", 1),
    "token_embed": NewColumns("token_embeddings", 2),
    "token_classify": NewColumns("token_probs", 2),
}
TABLE_TASKS: Final = tuple(_NEW_COLUMNS)
TokenCount = Annotated[int, Meta(ge=0, le=2**53)]
_Instant = Annotated[int, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=2.0**40)]


class BatchSpec(Struct, frozen=True, kw_only=True):
    """The settings of a job; JSON in RQ.

    ``params`` and ``model`` are the defaults of its lines. With one of ``column``, ``prompt`` and
    ``message`` the input is a table. Times are in seconds.
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
    task: Task = GENERATE  # of a table, as what follows
    column: str = ""  # with the prompts
    prompt: str = ""  # a prompt with the names of columns in braces
    message: str = ""  # the same as the message of a chat
    image: str = ""  # the column with a picture for that message
    into: str = ""  # the column for the answers; "": by the task

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
        if self.is_table:
            return self.output_path.with_name(f"{self.output_path.name}.errors.jsonl")
        stem, dot, rest = self.output_path.name.partition(".")
        return self.output_path.with_name(f"{stem}.errors{dot}{rest}")

    @property
    def results_path(self) -> Path:
        """The file of results by line: of a table only until each of its rows has one."""
        if self.is_table:
            return self.output_path.with_name(f"{self.output_path.name}.results.jsonl")
        return self.output_path

    @property
    def is_table(self) -> bool:
        """Whether the input is a table."""
        return bool(self.column or self.prompt or self.message)

    @property
    def new_columns(self) -> NewColumns:
        """The columns that a table gets."""
        new = _NEW_COLUMNS[self.task]
        return NewColumns(self.into or new.answer, new.dimensions)

    @property
    def columns(self) -> list[str]:
        """The columns of a table that make a prompt."""
        if self.column:
            return [self.column]
        named = columns_of(self.prompt or self.message, may_be_none=bool(self.image))
        return list(dict.fromkeys([*named, *([self.image] if self.image else [])]))

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
            **({"the results by row": self.results_path} if self.is_table else {}),
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
        errors += self._table_errors()
        if errors:
            raise SettingsError(errors)
        for path in (self.input_path, self.output_path, self.errors_path):
            check_codec(path)

    def _table_errors(self) -> list[str]:
        sources = [name for name in ("column", "prompt", "message") if getattr(self, name)]
        if not sources:
            return [
                f"{name}: needs a table: give column, prompt or message as well"
                for name in ("task", "into", "image")
                if getattr(self, name) not in {"", GENERATE}
            ]
        errors = []
        if len(sources) > 1:
            errors.append(f"{sources[1]}: give only one of column, prompt and message")
        if self.task not in TABLE_TASKS:
            errors.append(f"task: use one of {', '.join(TABLE_TASKS)}")
        elif self.message and self.task != GENERATE:
            errors.append(f"message: {self.task} takes no chat: give column or prompt")
        if is_compressed(self.errors_path):
            errors.append(f"errors: {self.errors_path} must not be compressed for a table")
        if self.image and not self.message:
            errors.append("image: goes with a message")
        if self.params.get("n", 1) != 1:
            errors.append("n: a row of a table gets one answer")
        try:
            self.columns  # noqa: B018 - whether it can be read
        except ValueError as error:
            errors.append(f"{sources[0]}: {error}")
        return errors

    def check_columns(self) -> None:
        """Raises `SettingsError` or `UnreadableFile` for a table that has not the columns."""
        if self.is_table:
            check_columns(self.input_path, self.columns, self.new_columns)


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
    """Identifies an input: a file, or a folder of tables."""

    size: int
    digest: str  # of the first and last bytes of each file

    @classmethod
    def of(cls, path: Path) -> InputMark:
        """The mark of an input; raises `UnreadableFile`."""
        size, digest = 0, hashlib.blake2b(digest_size=16)
        try:
            for each in table_files(path):
                with each.open("rb") as file:
                    length = os.fstat(file.fileno()).st_size
                    size += length
                    digest.update(file.read(_ENDS_BYTES))
                    file.seek(max(0, length - _ENDS_BYTES))
                    digest.update(file.read(_ENDS_BYTES))
        except OSError as error:
            raise UnreadableFile(f"{path}: {error.strerror or error}") from error
        return cls(size, digest.hexdigest())


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
