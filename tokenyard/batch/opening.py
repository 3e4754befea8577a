"""Begins or resumes a job: its state, its files, and the lines that are done."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from msgspec import UNSET, Struct, UnsetType

from tokenyard import clock
from tokenyard.batch.answers import ENDED_CODES
from tokenyard.batch.files import LineNumbers, UnreadableFile, read_lines
from tokenyard.batch.outputs import Outputs
from tokenyard.batch.state import (
    BatchSpec,
    BatchState,
    InputMark,
    RequestCounts,
    load_state,
    new_id,
)
from tokenyard.batch.tables import count_rows
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.parse import BadJson, ForeignJson
from tokenyard.protocol.texts import counted

#: Settings that a resumed job must not change, because they affect its results.
_LASTING = (
    "model",
    "params",
    "ordered",
    "errors_path",
    "task",
    "column",
    "prompt",
    "message",
    "image",
    "into",
)


@dataclass(slots=True)
class InputScan:
    """What a scan of an input file found."""

    lines: int = 0  # that are not blank
    named: int = 0  # that are JSON objects with an id
    #: Lines that repeat an earlier id.
    repeated: LineNumbers = field(default_factory=LineNumbers)


@dataclass(slots=True)
class OpenJob:
    """A job whose files are locked by this process."""

    state: BatchState
    outputs: Outputs
    input: InputScan
    cut_bytes: int  # truncated: what a killed process left half written

    @property
    def counts(self) -> RequestCounts:
        """Lines by their outcome."""
        results, errors = self.outputs.results, self.outputs.errors
        return RequestCounts(self.input.lines, results.count, errors.count)


@contextlib.contextmanager
def open_job(
    spec: BatchSpec,
    *,
    job_id: str = "",
    overwrite: bool = False,
    retry: str = "",
    lock_within_s: float = 0.0,
) -> Iterator[OpenJob]:
    """Read the input once, and the outputs that exist.

    ``job_id`` names a new job. ``overwrite`` discards the output of another job. ``retry``, a token
    that was not given before, runs all lines with an error again, as the input has them now; the
    results stay with the ids of their lines. Lines that ended by a cancel or by the completion
    window always run again. Raises `SettingsError`, `UnreadableFile` or `OutputInUse`.
    """
    spec.check()
    mark = InputMark.of(spec.input_path)
    with Outputs(spec.results_path, spec.errors_path, lock_within_s) as outputs:
        if overwrite and not _is_begun(spec, job_id):
            spec.state_path.unlink(missing_ok=True)
            outputs.clear()
        state = load_state(spec.state_path)
        if state is None:
            state = _begin(spec, mark, job_id, outputs)
        else:
            is_retried = retry not in {"", state.retried}
            check_same(spec, mark, state, may_correct=is_retried and not spec.is_table)
            state.spec = spec
            if state.input_mark != mark:
                outputs.renumber(state.id, numbers_by_id(spec.input_path))
            if is_retried or state.status in {"cancelled", "expired"}:
                _reopen(state, outputs, retry, is_retried=is_retried)
            state.input_mark = mark  # once no error has a number of the file before
        state.enter("validating")
        state.save()
        found = scan_input(spec)
        cut = outputs.recover(state.id)
        opened = OpenJob(state, outputs, found, cut)
        state.counts = opened.counts
        yield opened


def _is_begun(spec: BatchSpec, job_id: str) -> bool:
    """Whether the output belongs to this job, which was interrupted."""
    with contextlib.suppress(UnreadableFile):
        state = load_state(spec.state_path)
        return bool(job_id) and state is not None and state.id == job_id
    return False


def _begin(spec: BatchSpec, mark: InputMark, job_id: str, outputs: Outputs) -> BatchState:
    if not outputs.is_empty:
        error = (
            f"output: {spec.output} or {spec.errors_path} has lines already, and"
            f" {spec.state_path} does not name their job: --overwrite deletes them, or choose"
            " another output"
        )
        raise SettingsError([error])
    state = BatchState(id=job_id or new_id(), spec=spec, input_mark=mark)
    state.enter("validating")
    state.times["created"] = state.times["validating"]
    state.times["opened"] = spec.window_from or state.times["created"]
    return state


def check_same(spec: BatchSpec, mark: InputMark, state: BatchState, *, may_correct: bool) -> None:
    """Raises `SettingsError` where a job was begun with other settings or another input."""
    faults = [
        f"{name}: was {getattr(state.spec, name)!r} when {spec.output} was begun"
        for name in _LASTING
        if getattr(spec, name) != getattr(state.spec, name)
    ]
    if state.input_mark != mark and not may_correct:
        faults.append(
            f"input: {spec.input} is not the file with which {spec.output} was begun; where lines"
            " with an error were corrected, --retry-errors runs these again and keeps the results"
        )
    if faults:
        results = counted(state.counts.completed, "result")
        lost = f"{results} and {counted(state.counts.failed, 'error')}"
        raise SettingsError([*faults, f"to start over, --overwrite deletes its {lost}"])


def _reopen(state: BatchState, outputs: Outputs, retry: str, *, is_retried: bool) -> None:
    """Remove the answers of lines that run again, under new request ids."""
    state.round += 1
    state.save()
    outputs.reopen(None if is_retried else ENDED_CODES)
    state.retried = retry or state.retried
    state.times = {"created": state.times["created"], "opened": clock.wall()}


# The lines of an input, and those that repeat an earlier id. Ids are sorted into buckets on disk,
# so that only one bucket is in memory at a time.

_BUCKETS: Final = 256
#: A larger bucket is moved to disk; about 2700 ids.
_BUCKET_BYTES: Final = 64 * 1024
_DIGEST_BYTES: Final = 16
_NUMBER_BYTES: Final = 8


class _Named(Struct):
    custom_id: str | int | UnsetType = UNSET
    id: str | int | UnsetType = UNSET


_decode_named = ForeignJson[_Named](_Named).decode


def scan_input(spec: BatchSpec) -> InputScan:
    """Read a whole input once; raises `UnreadableFile`."""
    if spec.is_table:
        return InputScan(count_rows(spec.input_path))
    found = InputScan()
    with contextlib.ExitStack() as stack:
        buckets: list[IO[bytes]] = [
            stack.enter_context(tempfile.SpooledTemporaryFile(_BUCKET_BYTES))
            for _ in range(_BUCKETS)
        ]
        for number, raw in read_lines(spec.input_path):
            found.lines += 1
            name = id_of(raw) if raw is not None else None
            if name is not None:
                found.named += 1
                digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
                buckets[digest[0]].write(digest + number.to_bytes(_NUMBER_BYTES, "big"))
        for bucket in buckets:
            _mark_repeated(bucket, found.repeated)
    return found


def _mark_repeated(bucket: IO[bytes], marks: LineNumbers) -> None:
    bucket.seek(0)
    seen: set[bytes] = set()
    while entry := bucket.read(_DIGEST_BYTES + _NUMBER_BYTES):
        digest = entry[:_DIGEST_BYTES]
        if digest in seen:
            marks.add(int.from_bytes(entry[_DIGEST_BYTES:], "big"))
        seen.add(digest)


def numbers_by_id(path: Path) -> dict[str, int]:
    """The first line with each id, in memory as a whole; raises `UnreadableFile`."""
    numbers: dict[str, int] = {}
    for number, raw in read_lines(path):
        if raw is not None:
            numbers.setdefault(id_of(raw) or str(number), number)
    return numbers


def id_of(raw: bytes) -> str | None:
    """The id of a line; None if it has none or is not a JSON object."""
    try:
        named = _decode_named(raw)
    except BadJson:
        return None
    name = named.id if named.custom_id is UNSET else named.custom_id
    return None if name is UNSET else str(name)
