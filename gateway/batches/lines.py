"""Lines of batches, asked by vLLM's front end as a gateway asks it for an HTTP request."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.types import Message

from gateway.frontend.fetching import AUDIO_TIMEOUT_S
from gateway.frontend.models import STATE, FrontEnds
from gateway.http.context import CURRENT, RequestContext, Ticket
from gateway.http.errors import GatewayError, invalid
from gateway.http.incoming import (
    BODY,
    TRANSCRIBING,
    ParsedBody,
    check_body,
    inner_scope,
    replay,
    with_file_urls,
)
from gateway.http.sse import CaughtAnswer
from gateway.responses.bodies import PATH as RESPONSES_URL
from gateway.responses.bodies import for_front_end, read_options
from gateway.responses.store import PREFIX, StoredResponse
from gateway.responses.tap import ResponseTap
from tokenyard import clock
from tokenyard.batch.answers import LineError, OutputLine, Response, bad_line, line_id
from tokenyard.batch.asking import PATIENCE_S, Ending, WaitsForLimit, request_name
from tokenyard.batch.lines import BadLine, HttpLine, read_http_line, repeated
from tokenyard.batch.opening import OpenJob
from tokenyard.protocol.errors import Code

if TYPE_CHECKING:
    from gateway.models import ModelWatch

#: Fields that a batch cannot obey, with their only values.
_ONLY: Final[Mapping[str, Any]] = {
    "stream": False,
    "background": False,
    "previous_response_id": None,
    "use_beam_search": False,
}
#: Errors that end a line, although a client may try again: of this worker, or the queue's answer.
_FINAL: Final = ("model_not_servable", Code.MODEL_UNAVAILABLE)
#: Pauses before a line is asked again that the queue could not take.
_LEAST_PAUSE_S: Final = 0.1
_MOST_PAUSE_S: Final = 5.0


class Unanswered(Exception):
    """The line was under way when its job ended or its worker stopped."""


class LineAsker:
    """Asks the lines of one job; the ids of their requests follow from the job's id."""

    def __init__(
        self, job: OpenJob, ending: Ending, front_ends: FrontEnds, models: ModelWatch
    ) -> None:
        self._job = job
        self._spec = job.state.spec
        self._ending = ending
        self._front_ends = front_ends
        self._models = models
        #: Set when no answer is waited for any more.
        self.is_over = asyncio.Event()
        self._asked: dict[str, Ticket] = {}

    async def answer(self, number: int, raw: bytes | None) -> OutputLine:
        """The output for a line; raises `Unanswered` or `WaitsForLimit`."""
        line = read_http_line(number, raw, self._spec.endpoint)
        if isinstance(line, HttpLine) and number in self._job.input.repeated:
            line = repeated(line.custom_id)
        if isinstance(line, BadLine):
            return bad_line(self._job.state.id, number, line)
        name = f"{self._job.state.id}/{request_name(self._job, number)}"
        durable_id = blake2b(name.encode(), digest_size=16).hexdigest()
        while True:
            try:
                check_body(raw or b"")
                status, body = await self._ask(durable_id, line.body)
            except GatewayError as error:
                if error.code == Code.DEADLINE_EXCEEDED and self._is_expired():
                    self._ending.code = self._ending.code or "batch_expired"
                    return self._ending.line(number, line.custom_id)
                if error.retry_after_s is None or error.code in _FINAL:
                    return self._output(number, line, durable_id, error.status, error.body())
                if error.retry_after_s > PATIENCE_S and not self._has_accepted():
                    raise WaitsForLimit(self._job, error.message, error.retry_after_s) from error
                await self._pause(error.retry_after_s)
            else:
                return self._output(number, line, durable_id, status, body)

    def _has_accepted(self) -> bool:
        """Whether the queue has any of the lines."""
        return any(ticket.is_accepted for ticket in self._asked.values())

    def _is_expired(self) -> bool:
        expires_at = self._job.state.expires_at
        return expires_at is not None and clock.wall() >= expires_at

    async def _pause(self, wanted_s: float) -> None:
        pause_s = min(max(wanted_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        try:
            await asyncio.wait_for(self.is_over.wait(), pause_s)
        except TimeoutError:
            return
        raise Unanswered

    def _output(
        self, number: int, line: HttpLine, durable_id: str, status: int, packed: bytes
    ) -> OutputLine:
        body = json.loads(packed)
        return OutputLine(
            id=line_id(self._job.state.id, number),
            custom_id=line.custom_id,
            response=Response(status, durable_id, body),
            error=None if status == 200 else _line_error(number, body),
        )

    async def _ask(self, durable_id: str, given: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of what the endpoint would answer; raises `GatewayError`."""
        for field, only in _ONLY.items():
            if given.get(field) not in (None, only):
                raise invalid(field, "is not supported in a batch")
        if "messages" in given:
            given["messages"] = with_file_urls(given["messages"])
        profile = self._models.find(given, self._may_use)
        CURRENT.set(None)  # what is loaded belongs to no request
        STATE.set(await self._front_ends.state_of(profile))
        self._front_ends.check_path(profile, self._spec.endpoint)
        context = self._context(durable_id)
        CURRENT.set(context)
        caught = CaughtAnswer()
        send, body = caught.send, msgspec.json.encode(given)
        scope = inner_scope(self._spec.endpoint, durable_id)
        if self._spec.endpoint == RESPONSES_URL:
            body = for_front_end(given, PREFIX + durable_id, read_options(given))
            created_ms = round(context.created * 1000)
            stored = StoredResponse(durable_id, context.client, created_ms, profile.name, body)
            send = ResponseTap(caught.send, stored, context.ticket).send
        fault: Exception | None = None
        self._asked[durable_id] = context.ticket
        try:
            if self._spec.endpoint in TRANSCRIBING:
                scope[BODY], body = await self._form(given, context), b""
            await self._front_ends.app(scope, replay(body, self._hang_up), send)
        except GatewayError as error:
            context.ticket.fail(error)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises ends this line alone
            fault = error
        del self._asked[durable_id]
        if context.ticket.error is not None:
            raise context.ticket.error
        is_empty = fault is not None or caught.body in (b"", b"null")  # "null" is said to nobody
        if is_empty and self.is_over.is_set():
            raise Unanswered
        if is_empty:
            message = f"the body cannot be rendered to a prompt: {fault}"
            raise GatewayError(400, message) from fault
        return caught.status, caught.body

    def _may_use(self, model: str) -> bool:
        return self._spec.models is None or model in self._spec.models

    def _context(self, durable_id: str) -> RequestContext:
        expires_at = self._job.state.expires_at
        return RequestContext(
            durable_id=durable_id,
            client=self._job.state.id,
            created=clock.wall(),
            tenant=self._spec.tenant,
            priority_class=self._spec.priority_class,
            may_go_first=False,
            deadline_ms=None if expires_at is None else round(expires_at * 1000),
            is_patient=True,
            can_come_back=True,
            keep_s=self._spec.result_ttl_s,
        )

    async def _form(self, given: dict[str, Any], context: RequestContext) -> ParsedBody:
        """The form of a line that has its sound in ``file_url``, as in vLLM's batches.

        Raises `GatewayError`.
        """
        told = dict(given)
        url = told.pop("file_url", None)
        if not isinstance(url, str):
            raise invalid("file_url", "give the URL of the sound")
        try:
            content = await self._front_ends.fetcher.content(url, context, AUDIO_TIMEOUT_S)
        except GatewayError as error:
            message = f"file_url: {error.message}"
            raise GatewayError(error.status, message, param="file_url") from error
        fields = [
            (name, one)
            for name, value in told.items()
            for one in (value if isinstance(value, list) else [value])
            if one is not None
        ]
        sound = UploadFile(io.BytesIO(content), size=len(content))
        form = FormData([*fields, ("file", sound)])
        return ParsedBody(told, is_small=True, client=context.client, form=form)

    async def _hang_up(self) -> Message:
        """What the connection of a client would bring behind its request."""
        await self.is_over.wait()
        return {"type": "http.disconnect"}


def _line_error(number: int, body: Any) -> LineError:
    """The error of a line by the body of its answer."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return LineError("server_error", "the request failed", number)
    code = str(error.get("code") or "")
    if not code or code.isdecimal():  # no more than the status
        code = str(error.get("type"))
    return LineError(code, str(error.get("message")), number)
