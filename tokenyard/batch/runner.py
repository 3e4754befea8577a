"""Runs a batch job: lines in, answers out, a bounded window of requests between them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import msgspec
import redis

from tokenyard import clock
from tokenyard.batch.asking import Asking, AskingFactory, Ending, by_client
from tokenyard.batch.files import UnreadableFile
from tokenyard.batch.opening import OpenJob, check_same, id_of, open_job
from tokenyard.batch.outputs import FLUSH_EVERY_S
from tokenyard.batch.requests import check_params, read_input
from tokenyard.batch.rows import read_answers
from tokenyard.batch.state import (
    Batch,
    BatchSpec,
    BatchState,
    InputMark,
    RequestCounts,
    Status,
    load_state,
)
from tokenyard.batch.tables import check_target, write_table
from tokenyard.broker.connection import connected, open_connection
from tokenyard.protocol.errors import PermanentError, TokenyardError, TransientError
from tokenyard.protocol.keys import LINE_STATES, Keys
from tokenyard.protocol.texts import did_you_mean

_ENDS: Final[Mapping[str, Status]] = {"batch_cancelled": "cancelled", "batch_expired": "expired"}

_log = logging.getLogger("tokenyard.batch")


class BatchBroken(PermanentError):
    """The outputs do not contain one answer for each input line, or none could succeed."""


class Runner:
    """One run of one job, in one process."""

    def __init__(
        self,
        url: str,
        yard: str,
        spec: BatchSpec,
        *,
        asking: AskingFactory | None = None,
        on_progress: Callable[[Batch], None] = lambda _: None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """``asking`` asks the lines, by default a client.

        ``on_progress`` and ``is_cancelled`` are called about once a second, by a thread.
        """
        self._url = url
        self._yard = yard
        self._spec = spec
        self._on_progress = on_progress
        self._is_cancelled = is_cancelled
        self._asking = asking or by_client(url, yard)
        self._job: OpenJob  # from `run` on, as what follows
        self._ending: Ending
        self._rate: LineRate
        self._saving = threading.Lock()
        self._line_count = LineCount(url, yard)

    def run(
        self,
        *,
        job_id: str = "",
        overwrite: bool = False,
        retry: str = "",
        lock_within_s: float = 0.0,
    ) -> BatchState:
        """Run the lines that are not done; see `open_job` for the arguments.

        Raises the error that ends it early, such as `UnreadableFile`, `BatchBroken` or
        `NoCoordinator`. The next run continues from the files.
        """
        check_params(self._spec)
        self._check_model()
        if finished := self._finished_table(overwrite=overwrite):
            return finished
        self._spec.check_columns()
        if self._spec.is_table:
            check_target(self._spec.input_path, self._spec.output_path)
        with open_job(
            self._spec,
            job_id=job_id,
            overwrite=overwrite,
            retry=retry,
            lock_within_s=lock_within_s,
        ) as job:
            self._job = job
            self._ending = Ending(job.state.id)
            self._rate = LineRate(job.counts.done)
            _log.info("job %s: %s", job.state.id, _summary(job))
            try:
                self._run(job)
            except Exception as error:
                job.outputs.flush()
                self._enter("failed", str(error) or type(error).__name__)
                raise
            except BaseException:
                job.outputs.flush()
                self._save()
                raise
            return job.state

    def _run(self, job: OpenJob) -> None:
        if self._spec.endpoint and not job.input.named:
            raise BatchBroken(
                "the input file has no request: each line must be a JSON object with `custom_id`,"
                " `method`, `url` and `body`"
            )
        if job.counts.done < job.input.lines:
            self._enter("in_progress")
            self._run_lines(job)
        self._enter("finalizing")
        if self._ending.code:
            self._answer_unrun(job)
        self._check(job)
        self._write_table(job)
        self._enter(_ENDS[self._ending.code] if self._ending.unrun else "completed")
        self._tidy_up(job)
        counts = job.state.counts
        _log.info(
            "job %s: %s: %d input lines = %d results + %d errors",
            job.state.id,
            job.state.status,
            counts.total,
            counts.completed,
            counts.failed,
        )

    def _check_model(self) -> None:
        """Raise `BatchBroken` for a model that no worker serves, before a new job writes anything.

        An unreachable broker is reported later, by the client.
        """
        model = self._spec.model
        if not model or self._spec.state_path.exists():
            return
        InputMark.of(self._spec.input_path)
        raw: Any = None
        with contextlib.suppress(TokenyardError), connected(self._url) as connection:
            raw = connection.hget(Keys(self._yard).info, "models")
        served = msgspec.json.decode(raw, type=list[str]) if raw else []
        if served and model not in served:
            hint = did_you_mean(model, served) or "."
            raise BatchBroken(
                f"there is no model {model!r}{hint} Known models: {', '.join(served)}"
            )

    # Tables

    def _finished_table(self, *, overwrite: bool) -> BatchState | None:
        """The state of a table that has all its answers, and so no file of results any more."""
        state = load_state(self._spec.state_path) if self._spec.is_table else None
        if (
            state is None
            or overwrite
            or state.status != "completed"
            or self._spec.results_path.exists()
            or not self._spec.output_path.exists()
        ):
            return None
        check_same(self._spec, InputMark.of(self._spec.input_path), state, may_correct=False)
        return state

    def _write_table(self, job: OpenJob) -> None:
        """Write the table that the input is, if it is one."""
        spec = self._spec
        if spec.is_table:
            answers = read_answers(spec.results_path, spec.errors_path, job.input.lines)
            write_table(spec.input_path, spec.output_path, spec.new_columns, answers)

    def _tidy_up(self, job: OpenJob) -> None:
        """Delete the answers to rows, which are in the table, unless some are to be run again."""
        if self._spec.is_table and not job.counts.failed:
            self._spec.errors_path.unlink()
            self._spec.results_path.unlink()

    # Lines

    def _run_lines(self, job: OpenJob) -> None:
        self._check_ending()  # it may have waited for long
        with (
            self._asking(job, self._ending) as asking,
            JobMonitor(
                job.outputs.flush_old, lambda: self._check_progress(asking), asking.interrupt
            ) as monitor,
        ):
            for number, line in asking.answers(monitor.check):
                job.outputs.write(number, line)
            monitor.check()

    def _answer_unrun(self, job: OpenJob) -> None:
        """Write an error for each line that the job did not run."""
        for number, raw in read_input(self._spec):
            if number not in job.outputs.done:
                name = id_of(raw) if isinstance(raw, bytes) else None
                job.outputs.write(number, self._ending.line(number, name))

    def _check(self, job: OpenJob) -> None:
        """Compare the number of answers in the files with the input; raises `BatchBroken`."""
        job.outputs.sync()
        if InputMark.of(self._spec.input_path) != job.state.input_mark:
            raise UnreadableFile(f"{self._spec.input}: has changed while the job ran")
        job.outputs.recover(job.state.id)
        counts = job.counts
        if counts.done != counts.total:
            raise BatchBroken(
                f"{counts.total} input lines, but {counts.completed} results and"
                f" {counts.failed} errors"
            )

    # Monitoring

    def _check_progress(self, asking: Asking) -> None:
        """Check for cancellation and expiry, and save; the monitor calls it each second."""
        self._check_ending()
        if self._ending.code:
            asking.cancel()
        self._save()

    def _check_ending(self) -> None:
        ending, expires_at = self._ending, self._job.state.expires_at
        if not ending.code and self._is_cancelled():
            ending.code = "batch_cancelled"
            self._enter("cancelling")
        elif not ending.code and expires_at is not None and clock.wall() >= expires_at:
            ending.code = "batch_expired"

    def _enter(self, status: Status, message: str = "") -> None:
        self._job.state.enter(status, message)
        self._save()

    def _save(self) -> None:
        """Save the state and report the progress."""
        job, state = self._job, self._job.state
        with self._saving:
            before, state.counts = state.counts, job.counts
            state.usage = job.outputs.usage
            state.line_errors = job.outputs.line_errors
            state.save()
            self._line_count.advance(before, state.counts)
        per_s = self._rate.per_s(state.counts.done)
        left = state.counts.total - state.counts.done
        eta_s = left / per_s if per_s > 0 else None
        self._on_progress(state.as_batch(per_s, eta_s))


def _summary(job: OpenJob) -> str:
    counts = job.counts
    if not counts.done:
        return f"{counts.total} lines"
    cut = f", {job.cut_bytes} torn bytes truncated" if job.cut_bytes else ""
    return f"{counts.total} lines, {counts.done} of them done{cut}"


# A thread that flushes and checks a job while its own thread waits for answers.

CHECK_EVERY_S: Final = 1.0


class JobMonitor:
    """Flushes often and checks about once a second, until the context ends.

    An error ends it; `check` raises the error in the job's own thread.
    """

    def __init__(
        self,
        flush: Callable[[], None],
        check: Callable[[], None],
        on_error: Callable[[], None],
    ) -> None:
        """``on_error`` is called after an error, to wake the job's own thread."""
        self._flush = flush
        self._check = check
        self._on_error = on_error
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="batch-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the error that ended it."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        checked_at = clock.monotonic()
        try:
            while not clock.wait(self._stop, FLUSH_EVERY_S):
                self._flush()
                if clock.monotonic() - checked_at >= CHECK_EVERY_S:
                    checked_at = clock.monotonic()
                    self._check_safely()
        except Exception as error:  # noqa: BLE001 - it is raised again by `check`
            self._error = error
            self._on_error()

    def _check_safely(self) -> None:
        """The broker may be unreachable for a while; the job's own thread waits for it as well."""
        try:
            self._check()
        except TransientError as error:
            _log.warning("the batch job cannot be checked: %s", error)


# The pace of a job, and what the yard's leader shows of it to Prometheus.

_WINDOW_S: Final = 30.0
_SAMPLE_S: Final = 0.5
#: Counting is not part of a job, so a slow broker must not delay one for longer.
_PATIENCE_S: Final = 2.0


class LineRate:
    """Lines a second, over the last half minute."""

    def __init__(self, done: int) -> None:
        """``done`` lines are not of this run."""
        self._samples = deque([(clock.monotonic(), done)])

    def per_s(self, done: int) -> float:
        """The rate now, when so many lines are done."""
        now = clock.monotonic()
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        return (done - before) / max(now - since, 1e-3)


class LineCount:
    """Adds the lines of a job to the yard's counters."""

    def __init__(self, url: str, yard: str) -> None:
        self._url = url
        self._tally = Keys(yard).tally
        self._unsent: Counter[str] = Counter()

    def advance(self, before: RequestCounts, after: RequestCounts) -> None:
        """Add what was done in between; after an error it is added with the next call.

        Lines that run again after an error count again.
        """
        for state in LINE_STATES:
            self._unsent[state] += max(0, getattr(after, state) - getattr(before, state))
        try:
            self._send()
        except redis.RedisError as error:
            _log.debug("done lines are counted later: %s", error)

    def _send(self) -> None:
        pending = +self._unsent
        if not pending:
            return
        with open_connection(self._url, timeout_s=_PATIENCE_S, retries=0) as connection:
            pipeline = connection.pipeline()
            for state, count in pending.items():
                pipeline.hincrby(self._tally, f"count:lines:{state}", count)
            pipeline.execute()
        self._unsent.clear()
