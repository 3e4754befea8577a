"""Begins or resumes a job: its state, its files, and the lines that are done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tokenyard import clock
from tokenyard.batch.answers import ENDED_CODES
from tokenyard.batch.files import UnreadableFile
from tokenyard.batch.input_scan import InputScan, numbers_by_id, scan_input
from tokenyard.batch.outputs import Outputs
from tokenyard.batch.state import (
    BatchSpec,
    BatchState,
    InputMark,
    RequestCounts,
    load_state,
    new_id,
)
from tokenyard.protocol.errors import SettingsError
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
