"""Responses written by vLLM's front end, from the stored body and the replies of the queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Message, Receive

from gateway.frontend.models import STATE
from gateway.http.context import CURRENT, RequestContext
from gateway.http.errors import GatewayError, unavailable
from gateway.http.incoming import inner_scope, replay
from gateway.http.sse import CaughtAnswer
from gateway.responses.bodies import PATH
from gateway.responses.tap import Body, ResponseTap, failure
from tokenyard.broker.tasks import first_of

if TYPE_CHECKING:
    from gateway.frontend.models import FrontEnds
    from gateway.http.sse import Answer
    from gateway.models import ModelWatch
    from gateway.responses.store import StoredResponse

log = logging.getLogger("tokenyard.gateway")

HeaderList = Sequence[tuple[bytes, bytes]]
#: The replies are there already: only what should not happen takes so long.
_MOST_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Renderer:
    """Calls vLLM's app for responses."""

    front_ends: FrontEnds
    models: ModelWatch

    async def answer(
        self,
        stored: StoredResponse,
        context: RequestContext,
        headers: HeaderList,
        receive: Receive,
        answer: Answer,
    ) -> None:
        """Write a response to a client; raises `GatewayError` where none can begin."""
        ticket = context.ticket
        tap = ResponseTap(answer.send, stored, ticket)
        try:
            # vLLM's app knows neither that its answer was replaced nor why a request failed.
            fault = await _fault_of(self._call(stored, context, headers, stored.body, receive, tap))
        finally:
            await answer.close()
        if answer.is_replaced or (fault is None and tap.status < 500):
            return
        if not ticket.is_accepted:
            raise ticket.error or _not_rendered(stored, fault) from fault
        if ticket.error is None:
            raise _unreadable() if fault is None else fault
        await tap.fail(ticket.error)

    async def queue_up(
        self, stored: StoredResponse, context: RequestContext, headers: HeaderList
    ) -> Body:
        """Put the request on the queue and return the response as it is then.

        Raises `GatewayError` where vLLM or the queue refuses it.
        """
        caught = CaughtAnswer()
        tap = ResponseTap(caught.send, stored, context.ticket)
        call = self._call(stored, context, headers, stored.body, _never, tap)
        fault = await _fault_of(_run_until(call, context.ticket.decided))
        if not context.ticket.is_accepted:
            refused = context.ticket.error or _as_error(caught)
            raise refused or _not_rendered(stored, fault) from fault
        if tap.opening is None:
            raise _unreadable()
        return tap.opening | {"status": "queued"}

    async def finished(self, stored: StoredResponse) -> Body:
        """A response whose request is over."""
        context = replay_context(stored)
        tap = ResponseTap(_ignore, stored, context.ticket)
        call = self._call(stored, context, (), stored.body, _never, tap)
        fault: Exception | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
                fault = await _fault_of(call)
        if tap.final is not None:
            return tap.final
        if context.ticket.error is None or not context.ticket.is_accepted:
            log.warning("cannot render response %s: %r", stored.id, fault)
            raise context.ticket.error or _unreadable() from fault
        return await self.opening(stored) | failure(context.ticket.error)

    async def opening(self, stored: StoredResponse) -> Body:
        """A response before its first token; the queue is not asked."""
        is_open = asyncio.Event()

        async def hold(_: Message) -> None:
            if tap.opening is not None:
                is_open.set()
                await asyncio.Event().wait()

        context = replay_context(stored)
        tap = ResponseTap(hold, stored, context.ticket)
        body = json.dumps(json.loads(stored.body) | {"stream": True}).encode()
        call = self._call(stored, context, (), body, _never, tap)
        fault = await _fault_of(_run_until(call, is_open))
        if tap.opening is None:
            raise context.ticket.error or _unreadable() from fault
        return tap.opening

    async def _call(
        self,
        stored: StoredResponse,
        context: RequestContext,
        headers: HeaderList,
        body: bytes,
        receive: Receive,
        tap: ResponseTap,
    ) -> None:
        profile = self.models.profiles.get(stored.model)
        if profile is None:
            message = f"no host serves the model {stored.model!r} now"
            error = unavailable(message, retry_after_s=2.0)
            context.ticket.fail(error)
            raise error
        STATE.set(await self.front_ends.state_of(profile))
        CURRENT.set(context)
        await self.front_ends.app(
            inner_scope(PATH, stored.durable_id, headers), replay(body, receive), tap.send
        )


def replay_context(stored: StoredResponse) -> RequestContext:
    """The context in which a response is written again: its request is on the queue."""
    return RequestContext(
        durable_id=stored.durable_id,
        client=stored.client,
        created=stored.created_ms / 1000,
        continues=True,
        is_replay=True,
    )


async def _fault_of(call: Coroutine[Any, Any, None]) -> Exception | None:
    """Make a call in a task of its own; the error that it ends with."""
    ended: BaseException | None = (await asyncio.gather(call, return_exceptions=True))[0]
    if ended is not None and not isinstance(ended, Exception):
        raise ended
    return ended


async def _run_until(call: Coroutine[Any, Any, None], event: asyncio.Event) -> None:
    """Run a call until it ends or something has happened; raises the call's error."""
    running = asyncio.create_task(call)
    try:
        if running in await first_of(running, event.wait()) and not event.is_set():
            running.result()
    finally:
        await asyncio.gather(running, return_exceptions=True)


async def _ignore(_: Message) -> None:
    pass


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def _as_error(answer: CaughtAnswer) -> GatewayError | None:
    """The refusal of a body by vLLM, to be sent as the gateway's own."""
    try:
        error = json.loads(answer.body)["error"]
        kind, message = str(error["type"]), str(error["message"])
    except (ValueError, LookupError, TypeError):
        return None
    return GatewayError(answer.status, message, param=error.get("param"), kind=kind)


def _not_rendered(stored: StoredResponse, fault: Exception | None) -> GatewayError:
    """The error for a body at which vLLM's front end fails before it asks the queue."""
    log.warning("vLLM's front end failed at the body of %s: %r", stored.id, fault)
    message = f"the body cannot be rendered to a prompt: {fault}"
    return GatewayError(400, message)


def _unreadable() -> GatewayError:
    message = "the response cannot be read now"
    return unavailable(message, retry_after_s=2.0)
