"""Runs a batch job: lines in, answers out, a bounded window of requests between them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tokenyard.batch.answers import OutputLine, unrun_line
from tokenyard.batch.asking import Asked, ask_for, output_for
from tokenyard.batch.counted import LineCount
from tokenyard.batch.files import UnreadableFile, read_lines
from tokenyard.batch.hedging import Hedges
from tokenyard.batch.lines import ParsedLine
from tokenyard.batch.opening import Opened, open_job
from tokenyard.batch.outputs import Outputs
from tokenyard.batch.rate import Rate
from tokenyard.batch.state import BatchSpec, BatchState, InputMark, RequestCounts, Status
from tokenyard.batch.survey import id_of
from tokenyard.batch.watch import Watch
from tokenyard.broker.connection import open_connection, translated
from tokenyard.client.build import RequestBuilder
from tokenyard.client.handshake import YardInfo
from tokenyard.client.options import Item, SharedOptions
from tokenyard.client.sync import DEFAULT_CONNECT_TIMEOUT_S, Client
from tokenyard.protocol.errors import PermanentError, TokenyardError, TransientError, UnknownRequest
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Result
from tokenyard.protocol.wording import did_you_mean

#: Jobs wait for workers as long as it takes; only a completion window ends them.
_NO_HURRY_S: Final = 365 * 24 * 3600.0
#: Faults in a row, without a line done between them, after which the job is given up.
_MOST_FAULTS: Final = 5
_LEAST_WINDOW: Final = 1_000
_ENDS: Final[Mapping[str, Status]] = {"batch_cancelled": "cancelled", "batch_expired": "expired"}

_log = logging.getLogger("tokenyard.batch")


class BatchBroken(PermanentError):
    """The outputs do not have one answer for each line of the input."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job stands at one moment."""

    id: str
    status: Status
    counts: RequestCounts
    per_s: float  # lines a second, of late
    eta_s: float | None  # None while that is not known


def unknown_model(name: str, served: Collection[str]) -> str:
    """Why lines without a model of their own would all fail, in words; "" where they may run.

    A yard that serves nothing yet may come to serve anything.
    """
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
        self._rate = Rate()
        self._job: Opened | None = None
        self._under_way: dict[int, Asked] = {}
        self._is_exhausted = False
        self._end = ""  # the code for lines that are not run any more
        self._unrun = 0  # lines that have it
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
        """Run the job to its end, or what is left of it; see `open_job`.

        Raises what ends it early: `UnreadableFile`, `BatchBroken`, `NoCoordinator`...; what is
        done by then is in the files, and the next run goes on there.
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
            _log.info("job %s: %s", job.state.id, _beginning(job))
            try:
                self._run(job)
            except Exception as fault:
                job.outputs.flush()
                self._enter("failed", str(fault) or type(fault).__name__)
                raise
            except BaseException:
                job.outputs.flush()
                self._save()
                raise
            return job.state

    def _run(self, job: Opened) -> None:
        if job.counts.done < job.input.lines:
            self._enter("in_progress")
            self._ask_all(job)
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
        """Raise `BatchBroken` for a model that nobody serves, before anything is begun.

        What cannot be read now is told when the lines are asked.
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

    # Asking

    def _ask_all(self, job: Opened) -> None:
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
            with hedges, Watch(self._flush, lambda: self._look(client, hedges)) as watch:
                self._ask_until_done(client, window, watch, job)

    def _ask_until_done(self, client: Client, window: int, watch: Watch, job: Opened) -> None:
        """Go over the input until nothing is left; a fault of the yard makes another round."""
        faults = 0
        while True:
            before = len(job.outputs.done)
            try:
                return self._ask(client, window, watch, job)
            except (TransientError, UnknownRequest) as fault:
                watch.check()
                faults = 1 if len(job.outputs.done) > before else faults + 1
                if faults >= _MOST_FAULTS:
                    raise
                _log.warning("job %s: asks again for what is missing: %s", job.state.id, fault)

    def _ask(self, client: Client, window: int, watch: Watch, job: Opened) -> None:
        self._under_way.clear()
        self._is_exhausted = False
        watch.on_fault = client.close
        answers = client.map(
            self._items(job), window=window, ordered=self._spec.ordered, **self._shared(job.state)
        )
        for index, result in answers:
            self._take(job, self._under_way.pop(index), result)
        watch.check()

    def _items(self, job: Opened) -> Iterator[Item]:
        """The lines that are not done, as `Client.map` takes them."""
        index = 0
        for number, raw in read_lines(self._spec.input_path):
            if self._end:
                break
            if number in job.outputs.done:
                continue
            asked = self._asked(job, number, raw)
            self._under_way[index] = asked
            index += 1
            yield asked.item
        self._is_exhausted = True

    def _asked(self, job: Opened, number: int, raw: bytes | None) -> Asked:
        name = str(number) if job.state.round == 1 else f"{number}.{job.state.round}"
        is_repeated = number in job.input.repeated
        return ask_for(self._spec, number, raw, name, is_repeated=is_repeated)

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

    def _take(self, job: Opened, asked: Asked, result: Result) -> None:
        job.outputs.write(asked.number, self._output(job.state, asked, result))
        self._rate.count()

    def _output(self, state: BatchState, asked: Asked, result: Result) -> OutputLine:
        if isinstance(asked.sought, ParsedLine):
            if result.status == "expired" and self._spec.completion_window_s:
                self._end = self._end or "batch_expired"
            if self._end and result.status in {"cancelled", "expired"}:
                return self._unrun_line(state, asked.number, asked.sought.custom_id)
        return output_for(state.id, asked, result)

    def _answer_unrun(self, job: Opened) -> None:
        """Every line has an answer, also where the job ended before it was asked."""
        for number, raw in read_lines(self._spec.input_path):
            if number not in job.outputs.done:
                name = id_of(raw) if raw is not None else None
                job.outputs.write(number, self._unrun_line(job.state, number, name))

    def _unrun_line(self, state: BatchState, number: int, custom_id: str | None) -> OutputLine:
        self._unrun += 1
        return unrun_line(state.id, number, custom_id, self._end)

    def _check(self, job: Opened) -> None:
        """Count what is in the files; raises `BatchBroken`."""
        job.outputs.sync()
        if InputMark.of(self._spec.input_path) != job.state.input_mark:
            raise UnreadableFile(f"{self._spec.input}: has changed while the job ran")
        spec = self._spec
        completed, failed = Outputs.written(spec.output_path, spec.errors_path, job.state.id)
        if completed + failed != job.input.lines:
            raise BatchBroken(
                f"{job.input.lines} input lines, but {completed} results and {failed} errors"
            )

    # Looking after it

    def _flush(self) -> None:
        if self._job is not None:
            self._job.outputs.flush_old()

    def _look(self, client: Client, hedges: Hedges) -> None:
        """What a thread does about once a second while answers come."""
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
            for asked in self._waiting():
                client.cancel(asked.request_id)
        elif self._spec.hedge and not self._spec.ordered and self._is_exhausted:
            for asked, result in hedges.look(self._waiting()):
                job.outputs.write(asked.number, self._output(job.state, asked, result))
                job.outputs.flush()
                client.cancel(asked.request_id)
        self._save()

    def _waiting(self) -> list[Asked]:
        """Requests under way; the list is made in one step, since another thread changes it."""
        return [one for one in list(self._under_way.values()) if isinstance(one.sought, ParsedLine)]

    def _enter(self, status: Status, message: str = "") -> None:
        if self._job is not None:
            self._job.state.enter(status, message)
        self._save()

    def _save(self) -> None:
        """Say where the job stands, to whoever wants to know."""
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


def _beginning(job: Opened) -> str:
    counts = job.counts
    if not counts.done:
        return f"{counts.total} lines"
    cut = f", {job.cut_bytes} torn bytes cut off" if job.cut_bytes else ""
    return f"{counts.total} lines, {counts.done} of them done{cut}"


def _window_for(info: YardInfo) -> int:
    """Enough for every place at every worker twice, so that none runs dry between two bursts."""
    slots = sum(worker.slots for worker in info.workers.values())
    return max(_LEAST_WINDOW, math.ceil(2 * slots))
