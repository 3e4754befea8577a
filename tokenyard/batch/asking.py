"""Asks the lines of a job: by a client of the yard, or however else a program chooses."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from tokenyard import clock
from tokenyard.batch.answers import OutputLine, unrun_line
from tokenyard.batch.lines import ParsedLine
from tokenyard.batch.opening import OpenJob
from tokenyard.batch.requests import LineRequest, Pack, line_request, output_for, packs, read_input
from tokenyard.client.options import Item, SharedOptions
from tokenyard.client.sync import DEFAULT_CONNECT_TIMEOUT_S, Client
from tokenyard.protocol.errors import QuotaExceeded, TransientError, UnknownRequest
from tokenyard.protocol.packs import PACK_INPUTS
from tokenyard.protocol.replies import Result
from tokenyard.protocol.wire import GENERATE
from tokenyard.protocol.worker_info import WorkerInfo

#: A job waits for workers without limit; only a completion window ends it.
_NO_HURRY_S: Final = 365 * 24 * 3600.0
#: Errors in a row without progress after which the job fails.
_MAX_ERRORS: Final = 5
_LEAST_WINDOW: Final = 1_000
_LEAST_PICTURES: Final = 16
#: A job that a limit holds for longer gives its worker back.
PATIENCE_S: Final = 10.0
#: Longest time until it is run again: an operator may have raised the limit.
_LONGEST_PAUSE_S: Final = 300.0

_log = logging.getLogger("tokenyard.batch")

T = TypeVar("T")

#: The answer to the input line with this number.
Answer = tuple[int, OutputLine]


class WaitsForLimit(BaseException):
    """Nothing of a job can run for ``pause_s``, as a limit refuses it.

    Its worker may run another one meanwhile. Not an `Exception`, since the job has not failed.
    """

    def __init__(self, job: OpenJob, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        pause_s = min(retry_after_s, _LONGEST_PAUSE_S)
        if job.state.expires_at is not None:
            pause_s = min(pause_s, job.state.expires_at - clock.wall())
        self.pause_s = max(1, math.ceil(pause_s))


@dataclass(slots=True)
class Ending:
    """Why the rest of a job does not run, and how many lines were answered with that."""

    job_id: str
    code: str = ""  # `batch_cancelled` or `batch_expired`
    unrun: int = 0

    def line(self, number: int, custom_id: str | None) -> OutputLine:
        """The answer of a line that does not run."""
        self.unrun += 1
        return unrun_line(self.job_id, number, custom_id, self.code)


class Asking(Protocol):
    """The lines of one job that are being asked."""

    def answers(self, check: Callable[[], None]) -> Iterator[Answer]:
        """Ask all lines that are not done and yield their answers; once it ends, only those.

        ``check`` raises the error for which `interrupt` was called.
        """

    def interrupt(self) -> None:
        """Let `answers` end soon; another thread calls it."""

    def cancel(self) -> None:
        """Cancel what is under way, for the job ends; another thread calls it repeatedly."""


#: Begins to ask the lines of a job.
AskingFactory = Callable[[OpenJob, Ending], AbstractContextManager[Asking]]


def request_name(job: OpenJob, number: int) -> str:
    """The name of a line's request; new in each round, in which answered lines run again."""
    return str(number) if job.state.round == 1 else f"{number}.{job.state.round}"


def waiting_lines(
    job: OpenJob, ending: Ending, lines: Iterable[tuple[int, T]]
) -> Iterator[tuple[int, T]]:
    """The lines of the input that are not done, until the job ends."""
    for number, raw in lines:
        if ending.code:
            break
        if number not in job.outputs.done:
            yield number, raw


class ClientAsking:
    """Asks by `Client.map`, with a bounded window of requests."""

    def __init__(
        self,
        client: Client,
        job: OpenJob,
        ending: Ending,
        patience_s: float,
    ) -> None:
        self._client = client
        self._patience_s = patience_s
        self._job = job
        self._spec = job.state.spec
        self._ending = ending
        workers = client.info().workers.values()
        # Each picture under way lies at the broker.
        least = _LEAST_PICTURES if self._spec.image else _LEAST_WINDOW
        self._window = self._spec.window or window_for(workers, least)
        if self._spec.task != GENERATE:
            self._window = max(2 * len(workers), self._window // PACK_INPUTS, 2)
        self._pending: dict[int, Pack] = {}

    def answers(self, check: Callable[[], None]) -> Iterator[Answer]:
        """See `Asking`; starts again after an error of the yard."""
        done = self._job.outputs.done
        errors = 0
        while True:
            before = len(done)
            try:
                yield from self._map()
            except QuotaExceeded as limit:
                raise WaitsForLimit(self._job, str(limit), limit.retry_after_s or 0.0) from limit
            except (TransientError, UnknownRequest) as error:
                check()
                errors = 1 if len(done) > before else errors + 1
                if errors >= _MAX_ERRORS:
                    raise
                job_id = self._job.state.id
                _log.warning("job %s: sends the unanswered lines again: %s", job_id, error)
            else:
                return

    def _map(self) -> Iterator[Answer]:
        self._pending.clear()
        found = self._client.map(
            self._items(),
            window=self._window,
            ordered=self._spec.ordered,
            patience_s=self._patience_s,
            **self._shared(),
        )
        for index, result in found:
            pack = self._pending.pop(index)
            for request, one in zip(pack.lines, pack.results(result), strict=True):
                yield request.number, self._output(request, one)

    def _items(self) -> Iterator[Item]:
        lines = self._lines()
        is_packed = self._spec.task != GENERATE
        for index, pack in enumerate(
            packs(lines) if is_packed else (Pack([line], line.item) for line in lines)
        ):
            self._pending[index] = pack
            yield pack.item

    def _lines(self) -> Iterator[LineRequest]:
        for number, raw in waiting_lines(self._job, self._ending, read_input(self._spec)):
            name = request_name(self._job, number)
            is_repeated = number in self._job.input.repeated
            yield line_request(self._spec, number, raw, name, is_repeated=is_repeated)

    def _shared(self) -> SharedOptions:
        shared: SharedOptions = {
            "priority_class": self._spec.priority_class,
            "result_ttl_s": self._spec.result_ttl_s,
            "tenant": self._spec.tenant,
        }
        expires_at = self._job.state.expires_at
        if expires_at is not None:
            shared["deadline"] = datetime.datetime.fromtimestamp(expires_at, datetime.UTC)
        return shared

    def _output(self, request: LineRequest, result: Result) -> OutputLine:
        if isinstance(request.line, ParsedLine):
            if result.status == "expired" and self._spec.completion_window_s:
                self._ending.code = self._ending.code or "batch_expired"
            if self._ending.code and result.status in {"cancelled", "expired"}:
                return self._ending.line(request.number, request.line.custom_id)
        return output_for(self._job.state.id, request, result)

    def interrupt(self) -> None:
        """See `Asking`."""
        self._client.close()

    def cancel(self) -> None:
        """See `Asking`."""
        for pack in list(self._pending.values()):  # another thread changes them
            if pack.request_id:
                self._client.cancel(pack.request_id)


def by_client(
    url: str,
    yard: str,
    *,
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    patience_s: float = math.inf,
) -> AskingFactory:
    """Asks by a client whose name is the job's id; see `WaitsForLimit` for the patience."""

    @contextlib.contextmanager
    def begin(job: OpenJob, ending: Ending) -> Iterator[ClientAsking]:
        with Client(
            url,
            yard,
            client_id=job.state.id,
            connect_timeout_s=connect_timeout_s,
            result_timeout_s=_NO_HURRY_S,
        ) as client:
            yield ClientAsking(client, job, ending, patience_s)

    return begin


def window_for(workers: Iterable[WorkerInfo], least: int = _LEAST_WINDOW) -> int:
    """Twice the places of all workers, so that none runs out of requests between bursts."""
    return max(least, 2 * sum(worker.max_num_seqs for worker in workers))
