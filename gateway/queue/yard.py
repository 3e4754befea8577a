"""One yard, as the gateway uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from typing import Any, Final

from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError, unavailable
from gateway.queue.calls import call, carry_out
from gateway.queue.rate_limits import RateLimits
from gateway.queue.replies import ReplyReader
from gateway.queue.submitter import BurstSubmitter
from tokenyard import clock
from tokenyard.broker.connection import open_async_connection, translated
from tokenyard.clock import BrokerTime
from tokenyard.protocol.errors import Code, TokenyardError, quota_exceeded
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.system_clients import GATEWAY_CLIENT
from tokenyard.protocol.wire import Request
from tokenyard.scripts import Acceptance, Cancelled, Submitted
from tokenyard.scripts.client import CANCEL_ATTEMPTS, PLACE_FIELDS, cancel, place_of

log = logging.getLogger("tokenyard.gateway")

#: The yard ends a request within seconds of its deadline.
_DEADLINE_MARGIN_S: Final = 3.0
#: Time for the last cancellations.
_CANCEL_S: Final = 2.0


class YardQueue:
    """Submits requests, follows their replies, and cancels them."""

    def __init__(self, url: str, yard: str, name: str = GATEWAY_CLIENT) -> None:
        """``name`` owns the stream by which the reader of replies is woken."""
        self.keys = Keys(yard)
        self.url = url
        self.connection = open_async_connection(url)
        self._submitter = BurstSubmitter(self.connection, url, self.keys)
        self._rate_limits = RateLimits(self.connection, url, self.keys)
        self._reader = ReplyReader(url, self.keys.reply(name, secrets.token_hex(8)))
        self.loop = self._reader.loop
        self.broker_time = BrokerTime()  # `YardHealth` measures it
        self._cancels: set[asyncio.Task[Cancelled]] = set()
        #: Connections close because the gateway stops.
        self.is_leaving = False

    async def start(self) -> None:
        """Connect."""
        await self._reader.start()

    async def stop(self) -> None:
        """Disconnect; requests go on."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=_CANCEL_S)
        await self._reader.stop()
        await self.connection.aclose()

    async def ask(self, request: Request, context: RequestContext) -> AsyncGenerator[Reply, None]:
        """Submit a request, unless it is known, and yield all its replies from the first.

        Raises `GatewayError` where the queue refuses it. A caller that stops early cancels it,
        unless the request continues without its client.
        """
        stream, waking = self._reader.follow(self.keys.reply(request.client, request.id))
        is_over = False
        try:
            if context.is_replay:
                with translated(self.url):
                    await carry_out(self.connection, waking)
            else:
                context.asked += 1
                acceptance = await self._submitter.submit(
                    request,
                    context.priority_class,
                    refuse_late=context.deadline_ms is not None and not context.is_patient,
                    before=[*context.take_unsaved(), *waking],
                )
                with contextlib.suppress(TokenyardError):
                    context.rate_limits = await self._rate_limits.headers(
                        context.tenant, acceptance.eta_ms
                    )
                refused = _refusal(acceptance)
                if refused is not None:
                    is_over = True
                    context.asked -= 1
                    raise refused
            context.ticket.accept()
            async for reply in stream.until(self._give_up(context)):
                is_over = reply.event == "result"
                yield reply
        except TimeoutError as error:
            message = "nobody ended the request at its deadline"
            raise GatewayError(
                504, "timeout_error", message, code=Code.DEADLINE_EXCEEDED
            ) from error
        finally:
            self._reader.forget(stream)
            goes_on = context.continues or (self.is_leaving and context.can_come_back)
            if not is_over and not goes_on:
                self._cancel_later(request)

    def _give_up(self, context: RequestContext) -> float | None:
        """When to end a request that should have ended: without a leader nobody else does."""
        if context.deadline_ms is None:
            return None
        ends_at = self.broker_time.to_monotonic(context.deadline_ms)
        return max(ends_at, clock.monotonic()) + _DEADLINE_MARGIN_S

    def _cancel_later(self, request: Request) -> None:
        """Cancel in a task of its own: the caller is being cancelled itself."""
        why = "the HTTP client disconnected"
        task = asyncio.create_task(self.cancel(request.client, request.id, why))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def cancel(self, client: str, request_id: str, reason: str) -> Cancelled:
        """Cancel a request wherever it is."""
        run: Any = self.connection
        code = Cancelled.MOVED
        with contextlib.suppress(TokenyardError):
            for _ in range(CANCEL_ATTEMPTS):
                with translated(self.url):
                    seen = await run.hmget(self.keys.ledger(client, request_id), *PLACE_FIELDS)
                state, where = place_of(seen)
                wanted = cancel(
                    self.keys, client, request_id, state=state, where=where, reason=reason
                )
                code = await call(self.connection, self.url, wanted)
                if code is not Cancelled.MOVED:
                    return code
        log.warning("could not cancel %s/%s", client, request_id)
        return code


def _refusal(acceptance: Acceptance) -> GatewayError | None:
    match acceptance.code:
        case Submitted.FULL:
            return GatewayError(
                429,
                "rate_limit_error",
                "the queue is full",
                code="QUEUE_FULL",
                retry_after_s=acceptance.retry_after_ms / 1000,
            )
        case Submitted.QUOTA:
            return GatewayError(
                429,
                "rate_limit_error",
                quota_exceeded(acceptance.limit, acceptance.retry_after_s),
                code=Code.QUOTA_EXCEEDED,
                retry_after_s=acceptance.retry_after_s,
            )
        case Submitted.LATE:
            return unavailable(
                f"the answer would come too late: about {acceptance.eta_ms / 1000:.1f} s of work "
                "are waiting",
                code="DEADLINE_UNMEETABLE",
                retry_after_s=acceptance.eta_ms / 1000,
            )
        case Submitted.REUSED:
            return GatewayError(
                422,
                "invalid_request_error",
                "this idempotency key was used for another request",
                code="ID_REUSED",
            )
        case _:
            return None
