"""Begin a job, or go on with one: its state, its files, and what is done already."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tokenyard.batch.answers import ENDED_CODES
from tokenyard.batch.files import UnreadableFile
from tokenyard.batch.outputs import Outputs
from tokenyard.batch.state import (
    BatchSpec,
    BatchState,
    InputMark,
    RequestCounts,
    load_state,
    new_id,
)
from tokenyard.batch.survey import Survey, survey
from tokenyard.protocol.errors import SettingsError

#: What must not change while a job goes on, since it would show in the results.
_LASTING = ("model", "params", "ordered", "errors_path")


@dataclass(slots=True)
class Opened:
    """A job whose files belong to this process."""

    state: BatchState
    outputs: Outputs
    input: Survey
    cut_bytes: int  # of what a killed process had left half written

    @property
    def counts(self) -> RequestCounts:
        """Lines by what became of them."""
        return RequestCounts(self.input.lines, *self.outputs.counts)


@contextlib.contextmanager
def open_job(
    spec: BatchSpec,
    *,
    job_id: str = "",
    overwrite: bool = False,
    retry: str = "",
    lock_within_s: float = 0.0,
) -> Iterator[Opened]:
    """Read the input once, and the outputs as far as there are any.

    ``job_id`` names a job that is begun. ``overwrite`` begins anew what another job has begun;
    ``retry``, a word that was not given before, runs all lines again that have an error. Lines
    that were cut short by a cancel or by the completion window always run again. Raises
    `SettingsError`, `UnreadableFile` or `OutputInUse`.
    """
    spec.check()
    mark = InputMark.of(spec.input_path)
    with Outputs(spec.output_path, spec.errors_path, lock_within_s) as outputs:
        if overwrite and not _is_begun(spec, job_id):
            spec.state_path.unlink(missing_ok=True)
            outputs.clear()
        state = load_state(spec.state_path)
        if state is None:
            state = _begin(spec, mark, job_id, outputs)
        else:
            _check_same(spec, mark, state)
            state.spec = spec
            _reopen(state, outputs, retry)
        state.enter("validating")
        state.save()
        found = survey(spec.input_path)
        cut = outputs.recover(state.id)
        opened = Opened(state, outputs, found, cut)
        state.counts = opened.counts
        yield opened


def _is_begun(spec: BatchSpec, job_id: str) -> bool:
    """Whether the output is that of this very job, which was interrupted."""
    with contextlib.suppress(UnreadableFile):
        state = load_state(spec.state_path)
        return bool(job_id) and state is not None and state.id == job_id
    return False


def _begin(spec: BatchSpec, mark: InputMark, job_id: str, outputs: Outputs) -> BatchState:
    if not outputs.is_empty:
        fault = (
            f"output: {spec.output} or {spec.errors_path} has lines already, and"
            f" {spec.state_path} does not say of which job: overwrite it, or choose another"
        )
        raise SettingsError([fault])
    state = BatchState(id=job_id or new_id(), spec=spec, input_mark=mark)
    state.enter("validating")
    state.times["created"] = state.times["opened"] = state.times["validating"]
    return state


def _check_same(spec: BatchSpec, mark: InputMark, state: BatchState) -> None:
    faults = [
        f"{name}: was {getattr(state.spec, name)!r} when {spec.output} was begun"
        for name in _LASTING
        if getattr(spec, name) != getattr(state.spec, name)
    ]
    if state.input_mark != mark:
        faults.append(f"input: {spec.input} is not the file with which {spec.output} was begun")
    if faults:
        raise SettingsError([*faults, "to begin anew, overwrite the output"])


def _reopen(state: BatchState, outputs: Outputs, retry: str) -> None:
    """Make room for new answers, which the yard must not take for those of before."""
    is_retried = retry not in {"", state.retried}
    if not is_retried and state.status not in {"cancelled", "expired"}:
        return
    state.round += 1
    state.save()
    outputs.reopen(None if is_retried else ENDED_CODES)
    state.retried = retry or state.retried
    state.times = {"created": state.times["created"], "opened": time.time()}
