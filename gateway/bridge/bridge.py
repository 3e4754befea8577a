"""The engine of some front ends: what they ask goes to the queue, and its answers come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.bridge import engine_core
from gateway.bridge.answers import Answer
from gateway.bridge.engine_core import ABORT, ADD, UTILITY, Channel, EngineCoreRequest, FailureForm
from gateway.bridge.requests import Refused, RequestReader
from gateway.http.errors import GatewayError
from gateway.queue.yard import has_logprobs, refusal
from tokenyard import clock
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.wire import GENERATE
from tokenyard.scripts.answers import Submitted
from tokenyard.telemetry.metrics import Metric, numbers

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from gateway.bridge.journal import Journal
    from gateway.queue.replies import ReplyStream
    from gateway.queue.yard import YardQueue

log = logging.getLogger("tokenyard.bridge")

REQUESTS = Metric(
    "tokenyard_bridge_requests_total",
    "counter",
    ("outcome",),
    "Requests of front ends, by how they ended.",
)
OPEN = Metric("tokenyard_bridge_open", "gauge", (), "Requests for which a front end waits.")
FRONTS = Metric("tokenyard_bridge_front_ends", "gauge", (), "Front ends that have their engine.")
#: All of them, as the page tells them.
METRICS: Final = (REQUESTS, OPEN, FRONTS)
_STOPPING: Final = "the bridge is stopping"
_POLL_S: Final = 0.05
_ASKED_BY_PYTHON: Final = "get_supported_tasks"
#: What front ends ask at their start, and in their probes.
_CALLS: Final[dict[str, Any]] = {
    "reset_mm_cache": None,
    "is_sleeping": False,
    "is_scheduler_paused": False,
}


class Bridge:
    """Serves the requests of all front ends."""

    #: Set before the first request.
    reader: RequestReader
    #: What the model does.
    task: str = GENERATE
    #: How front ends are told of a failed request.
    form: FailureForm = "bare"

    def __init__(self, queue: YardQueue) -> None:
        self._queue = queue
        self._open: dict[str, Answer] = {}
        self._by_stream: dict[ReplyStream, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outcomes: Counter[tuple[str]] = Counter()
        #: Front ends that have their engine.
        self.front_ends = 0
        self.is_draining = False

    def take(self, kind: bytes, frames: list[bytes], channel: Channel, journal: Journal) -> None:
        """Do what a front end asks."""
        try:
            if kind == ADD:
                asked = engine_core.decode_request(frames[0])
                journal.opened(asked.request_id)
                self._add(asked, channel, journal)
            elif kind == ABORT:
                for request_id in engine_core.decode_ids(frames[0]):
                    if answer := self._open.get(request_id):
                        self._leave(answer, "aborted", "the front end has aborted it")
            elif kind == UTILITY:
                _, call, method, _ = engine_core.decode_call(frames[0])
                if method == _ASKED_BY_PYTHON:
                    journal.note_python()
                calls = {**_CALLS, _ASKED_BY_PYTHON: [self.task]}
                failure = None if method in calls else f"{method}: the queue has no such call"
                channel.answer(call, calls.get(method), failure)
        except msgspec.MsgspecError as error:
            log.error("a message of a front end cannot be read: %s", error)

    def _add(self, asked: EngineCoreRequest, channel: Channel, journal: Journal) -> None:
        if self.is_draining:
            self._refuse(asked.request_id, channel, journal, _STOPPING, retryable=True)
            return
        try:
            wanted = self.reader.read(asked)
        except (Refused, GatewayError) as error:
            self._refuse(asked.request_id, channel, journal, str(error), is_invalid=True)
            return
        except Exception as error:
            log.exception("%s cannot be read", asked.request_id)
            self._refuse(asked.request_id, channel, journal, repr(error), is_invalid=True)
            return
        prompt_tokens = len(asked.prompt_token_ids or ())
        answer = Answer(asked.request_id, prompt_tokens, wanted, channel, journal)
        self._open[answer.id] = answer
        task = asyncio.create_task(self._submit(answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, answer: Answer) -> None:
        """Submit a request; its replies come to `has_news`."""
        reader, request = self._queue.reader, answer.asked.request
        answer.stream = stream = reader.follow(
            request.client, request.id, is_whole=has_logprobs(request), is_elsewhere=False
        )
        self._by_stream[stream] = answer
        try:
            acceptance = await self._queue.submit(
                request,
                answer.asked.priority_class,
                refuse_late=request.deadline_ms is not None,
            )
            if refused := refusal(acceptance):
                raise refused
        except (GatewayError, TokenyardError, ValueError) as error:
            status = error.status if isinstance(error, GatewayError) else 503
            if self._close(answer):
                self._refuse(
                    answer.id,
                    answer.channel,
                    answer.journal,
                    str(error),
                    is_invalid=isinstance(error, ValueError) or status < 429,
                    retryable=status in (429, 503) and not isinstance(error, ValueError),
                )
            return
        if answer.id in self._open:
            self._end_at_deadline(answer)
            with contextlib.suppress(TokenyardError):  # it is looked at again
                await reader.accepted(stream, is_new=acceptance.code is Submitted.ACCEPTED)
        elif answer.is_left and not answer.asked.is_kept:  # meanwhile
            self._queue.cancel_later(request, "the front end has aborted it")

    def _end_at_deadline(self, answer: Answer) -> None:
        """Without a leader nobody else ends it."""
        at = self._queue.give_up(answer.asked.request.deadline_ms)
        if at is not None:
            left_s = at - clock.monotonic()
            answer.timer = asyncio.get_running_loop().call_later(left_s, self._expire, answer)

    def _expire(self, answer: Answer) -> None:
        if self._close(answer):
            message = "nobody ended the request at its deadline"
            self._refuse(answer.id, answer.channel, answer.journal, message, retryable=True)

    def _refuse(
        self, request_id: str, channel: Channel, journal: Journal, message: str, **kind: bool
    ) -> None:
        log.warning("%s is refused: %s", request_id, message)
        self._outcomes["refused",] += 1
        last = engine_core.failed(request_id, message, form=self.form, **kind)
        channel.send([last], [request_id])
        journal.ended([request_id])

    def has_news(self, streams: Iterable[ReplyStream]) -> None:
        """Send what came at one moment as one step."""
        steps: dict[Channel, tuple[list[Any], list[Answer]]] = {}
        for stream in dict.fromkeys(streams):
            answer = self._by_stream.get(stream)
            if answer is None:
                continue
            outputs, over = steps.setdefault(answer.channel, ([], []))
            outputs += answer.read(self.form)
            if stream.pending.is_over:
                over.append(answer)
                self._close(answer)
                self._outcomes["failed" if answer.fault else "answered",] += 1
                if answer.fault:
                    log.warning("%s has failed: %s", answer.id, answer.fault)
        for channel, (outputs, over) in steps.items():
            if outputs:
                channel.send(outputs, [answer.id for answer in over])
            for answer in over:
                answer.journal.ended([answer.id])

    def end(self, request_ids: Iterable[str], channel: Channel, why: str) -> None:
        """End what a front end still waits for from an engine before this one."""
        lost = list(request_ids)
        if lost:
            log.warning("%d requests end with an error, unless they had ended: %s", len(lost), why)
            last = [engine_core.failed(one, why, form=self.form) for one in lost]
            channel.send(last, lost)

    def abandon(self, channel: Channel) -> None:
        """The front end is gone, and so are those who waited."""
        for answer in [one for one in self._open.values() if one.channel is channel]:
            self._leave(answer, "abandoned", "the front end is gone")

    def _leave(self, answer: Answer, outcome: str, why: str) -> None:
        """Nobody waits for an answer any more; one that can be asked for again goes on.

        A front end says the same where its client is gone and where it has found a stop string.
        """
        is_submitted = answer.stream is not None and answer.stream.pending.is_submitted
        self._close(answer)
        answer.is_left = True
        self._outcomes[outcome,] += 1
        answer.journal.ended([answer.id])
        if is_submitted and not answer.asked.is_kept:
            self._queue.cancel_later(answer.asked.request, why)

    def _close(self, answer: Answer) -> bool:
        """Forget an answer; whether somebody waited for it."""
        if answer.timer is not None:
            answer.timer.cancel()
        if answer.stream is not None and answer.stream in self._by_stream:
            del self._by_stream[answer.stream]
            self._queue.reader.forget(answer.stream)
        return self._open.pop(answer.id, None) is not None

    async def drain(self, within_s: float) -> None:
        """Refuse what comes, and end what is left of the rest after ``within_s``."""
        self.is_draining = True
        give_up = clock.monotonic() + within_s
        while self._open and clock.monotonic() < give_up:
            await clock.pause(_POLL_S)
        for answer in list(self._open.values()):
            self.end([answer.id], answer.channel, _STOPPING)
            self._leave(answer, "abandoned", _STOPPING)

    def collect(self) -> Iterator[Family]:
        """The metrics as they are now; another thread asks."""
        yield numbers(REQUESTS, dict(self._outcomes))
        yield numbers(OPEN, {(): len(self._open)})
        yield numbers(FRONTS, {(): self.front_ends})
