"""Runs a batch job: lines in, answers out, a bounded window of requests between them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import msgspec

from tokenyard.batch.answers import OutputLine, unrun_line
from tokenyard.batch.files import UnreadableFile, read_lines
from tokenyard.batch.hedging import Hedges
from tokenyard.batch.input_scan import id_of
from tokenyard.batch.lines import ParsedLine
from tokenyard.batch.monitor import JobMonitor
from tokenyard.batch.opening import OpenJob, open_job
from tokenyard.batch.outputs import Outputs
from tokenyard.batch.progress import LineCount, LineRate, Progress
from tokenyard.batch.requests import LineRequest, line_request, output_for
from tokenyard.batch.state import BatchSpec, BatchState, InputMark, Status
from tokenyard.broker.connection import open_connection, translated
from tokenyard.client.build import RequestBuilder
from tokenyard.client.handshake import YardInfo
from tokenyard.client.options import Item, SharedOptions
from tokenyard.client.sync import DEFAULT_CONNECT_TIMEOUT_S, Client
from tokenyard.protocol.errors import PermanentError, TokenyardError, TransientError, UnknownRequest
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Result
from tokenyard.protocol.texts import did_you_mean

#: A job waits for workers without limit; only a completion window ends it.
_NO_HURRY_S: Final = 365 * 24 * 3600.0
#: Errors in a row without progress after which the job fails.
_MAX_ERRORS: Final = 5
_LEAST_WINDOW: Final = 1_000
_ENDS: Final[Mapping[str, Status]] = {"batch_cancelled": "cancelled", "batch_expired": "expired"}

_log = logging.getLogger("tokenyard.batch")


class BatchBroken(PermanentError):
    """The outputs do not contain one answer for each input line, or none could succeed."""


def unknown_model(name: str, served: Collection[str]) -> str:
    """An error message if the yard serves models, but not this one; else ""."""
    if not name or name in served or not served:
        return ""
    hint = did_you_mean(name, served) or "."
    return f"there is no model {name!r}{hint} Known models: {', '.join(served)}"


class Runner:
    """One run of one job, in one process."""

    def __init__(
        self,
        url: str,
        yard: str,
        spec: BatchSpec,
        *,
        on_progress: Callable[[Progress], None] = lambda _: None,
        is_cancelled: Callable[[], bool] = lambda: False,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        """``on_progress`` and ``is_cancelled`` are called about once a second, by a thread."""
        self._url = url
        self._yard = yard
        self._spec = spec
        self._on_progress = on_progress
        self._is_cancelled = is_cancelled
        self._connect_timeout_s = connect_timeout_s
        self._rate = LineRate()
        self._job: OpenJob | None = None
        self._pending: dict[int, LineRequest] = {}
        self._is_exhausted = False
        self._end = ""  # error code of the lines that no longer run
        self._unrun = 0  # lines with that code
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
        RequestBuilder("anon", None).prepare("?", {"params": self._spec.params})
        self._check_model()
        with open_job(
            self._spec,
            job_id=job_id,
            overwrite=overwrite,
            retry=retry,
            lock_within_s=lock_within_s,
        ) as job:
            self._job = job
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
        if job.counts.done < job.input.lines:
            self._enter("in_progress")
            self._run_lines(job)
        self._enter("finalizing")
        if self._end:
            self._answer_unrun(job)
        self._check(job)
        self._enter(_ENDS[self._end] if self._unrun else "completed")
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
        if not self._spec.model or self._spec.state_path.exists():
            return
        InputMark.of(self._spec.input_path)
        raw: Any = None
        with (
            contextlib.suppress(TokenyardError),
            translated(self._url),
            open_connection(self._url) as connection,
        ):
            raw = connection.hget(Keys(self._yard).info, "models")
        served = msgspec.json.decode(raw, type=list[str]) if raw else []
        if problem := unknown_model(self._spec.model, served):
            raise BatchBroken(problem)

    # Requests

    def _run_lines(self, job: OpenJob) -> None:
        with Client(
            self._url,
            self._yard,
            client_id=job.state.id,
            connect_timeout_s=self._connect_timeout_s,
            result_timeout_s=_NO_HURRY_S,
        ) as client:
            info = client.info()
            window = self._spec.window or _window_for(info)
            hedges = Hedges(client, self._url, self._yard, self._shared(job.state))
            with (
                hedges,
                JobMonitor(self._flush, lambda: self._check_progress(client, hedges)) as monitor,
            ):
                self._map_until_done(client, window, monitor, job)

    def _map_until_done(
        self, client: Client, window: int, monitor: JobMonitor, job: OpenJob
    ) -> None:
        """Map the input until no line is left; start again after an error of the yard."""
        errors = 0
        while True:
            before = len(job.outputs.done)
            try:
                return self._map(client, window, monitor, job)
            except (TransientError, UnknownRequest) as error:
                monitor.check()
                errors = 1 if len(job.outputs.done) > before else errors + 1
                if errors >= _MAX_ERRORS:
                    raise
                _log.warning("job %s: sends the unanswered lines again: %s", job.state.id, error)

    def _map(self, client: Client, window: int, monitor: JobMonitor, job: OpenJob) -> None:
        self._pending.clear()
        self._is_exhausted = False
        monitor.on_error = client.close
        answers = client.map(
            self._items(job), window=window, ordered=self._spec.ordered, **self._shared(job.state)
        )
        for index, result in answers:
            self._take(job, self._pending.pop(index), result)
        monitor.check()

    def _items(self, job: OpenJob) -> Iterator[Item]:
        """The items of the lines that are not done."""
        index = 0
        for number, raw in read_lines(self._spec.input_path):
            if self._end:
                break
            if number in job.outputs.done:
                continue
            request = self._request(job, number, raw)
            self._pending[index] = request
            index += 1
            yield request.item
        self._is_exhausted = True

    def _request(self, job: OpenJob, number: int, raw: bytes | None) -> LineRequest:
        name = str(number) if job.state.round == 1 else f"{number}.{job.state.round}"
        is_repeated = number in job.input.repeated
        return line_request(self._spec, number, raw, name, is_repeated=is_repeated)

    def _shared(self, state: BatchState) -> SharedOptions:
        shared: SharedOptions = {
            "priority_class": self._spec.priority_class,
            "result_ttl_s": self._spec.result_ttl_s,
            "tenant": self._spec.tenant,
        }
        if state.expires_at is not None:
            shared["deadline"] = datetime.datetime.fromtimestamp(state.expires_at, datetime.UTC)
        return shared

    # Answers

    def _take(self, job: OpenJob, request: LineRequest, result: Result) -> None:
        job.outputs.write(request.number, self._output(job.state, request, result))
        self._rate.count()

    def _output(self, state: BatchState, request: LineRequest, result: Result) -> OutputLine:
        if isinstance(request.line, ParsedLine):
            if result.status == "expired" and self._spec.completion_window_s:
                self._end = self._end or "batch_expired"
            if self._end and result.status in {"cancelled", "expired"}:
                return self._unrun_line(state, request.number, request.line.custom_id)
        return output_for(state.id, request, result)

    def _answer_unrun(self, job: OpenJob) -> None:
        """Write an error for each line that the job did not run."""
        for number, raw in read_lines(self._spec.input_path):
            if number not in job.outputs.done:
                name = id_of(raw) if raw is not None else None
                job.outputs.write(number, self._unrun_line(job.state, number, name))

    def _unrun_line(self, state: BatchState, number: int, custom_id: str | None) -> OutputLine:
        self._unrun += 1
        return unrun_line(state.id, number, custom_id, self._end)

    def _check(self, job: OpenJob) -> None:
        """Compare the number of answers in the files with the input; raises `BatchBroken`."""
        job.outputs.sync()
        if InputMark.of(self._spec.input_path) != job.state.input_mark:
            raise UnreadableFile(f"{self._spec.input}: has changed while the job ran")
        spec = self._spec
        completed, failed = Outputs.written(spec.output_path, spec.errors_path, job.state.id)
        if completed + failed != job.input.lines:
            raise BatchBroken(
                f"{job.input.lines} input lines, but {completed} results and {failed} errors"
            )

    # Monitoring

    def _flush(self) -> None:
        if self._job is not None:
            self._job.outputs.flush_old()

    def _check_progress(self, client: Client, hedges: Hedges) -> None:
        """Check for cancellation and expiry, hedge, and save; the monitor calls it each second."""
        job = self._job
        if job is None:
            return
        expires_at = job.state.expires_at
        if not self._end and self._is_cancelled():
            self._end = "batch_cancelled"
            self._enter("cancelling")
        elif not self._end and expires_at is not None and time.time() >= expires_at:
            self._end = "batch_expired"
        if self._end:
            for request in self._sent():
                client.cancel(request.request_id)
        elif self._spec.hedge and not self._spec.ordered and self._is_exhausted:
            for request, result in hedges.look(self._sent()):
                job.outputs.write(request.number, self._output(job.state, request, result))
                job.outputs.flush()
                client.cancel(request.request_id)
        self._save()

    def _sent(self) -> list[LineRequest]:
        """Pending requests, copied at once because another thread changes them."""
        return [one for one in list(self._pending.values()) if isinstance(one.line, ParsedLine)]

    def _enter(self, status: Status, message: str = "") -> None:
        if self._job is not None:
            self._job.state.enter(status, message)
        self._save()

    def _save(self) -> None:
        """Save the state and report the progress."""
        job = self._job
        if job is None:
            return
        with self._saving:
            before, job.state.counts = job.state.counts, job.counts
            job.state.save()
            self._line_count.advance(before, job.state.counts)
        per_s = self._rate.per_s()
        left = job.counts.total - job.counts.done
        eta_s = left / per_s if per_s > 0 else None
        self._on_progress(Progress(job.state.id, job.state.status, job.counts, per_s, eta_s))


def _summary(job: OpenJob) -> str:
    counts = job.counts
    if not counts.done:
        return f"{counts.total} lines"
    cut = f", {job.cut_bytes} torn bytes truncated" if job.cut_bytes else ""
    return f"{counts.total} lines, {counts.done} of them done{cut}"


def _window_for(info: YardInfo) -> int:
    """Twice the places of all workers, so that none runs out of requests between bursts."""
    places = sum(worker.max_num_seqs for worker in info.workers.values())
    return max(_LEAST_WINDOW, 2 * places)
