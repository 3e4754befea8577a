"""One yard, as the gateway uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.http.context import RequestContext
from gateway.http.errors import GatewayError, invalid, unavailable
from gateway.queue.calls import Broker, Bursts, Command
from gateway.queue.replies import ReplyReader
from tokenyard import clock
from tokenyard.broker.connection import open_async_connection
from tokenyard.clock import BrokerTime
from tokenyard.protocol.errors import Code, TokenyardError, quota_exceeded
from tokenyard.protocol.keys import GATEWAY_CLIENT, Keys, PriorityClass
from tokenyard.protocol.media import NO_MEDIA, Media
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.streams import unix_ms, whole
from tokenyard.protocol.tenants import (
    DAY,
    DEFAULTS,
    MINUTE,
    TenantSettings,
    TokenWindow,
    decode_tenants,
)
from tokenyard.protocol.wire import Input, PoolingParams, Request
from tokenyard.scripts import client as scripts
from tokenyard.scripts.answers import Acceptance, Cancelled, Submitted

log = logging.getLogger("tokenyard.gateway")

#: The yard ends a request within seconds of its deadline.
_DEADLINE_MARGIN_S: Final = 3.0
#: Time for the last cancellations.
_CANCEL_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Submission:
    request: Request
    priority_class: PriorityClass
    refuse_late: bool
    before: Sequence[Command]
    media: Media


class YardQueue:
    """Submits requests, follows their replies, and cancels them."""

    def __init__(self, url: str, yard: str, name: str = GATEWAY_CLIENT) -> None:
        """``name`` begins that of the stream of replies, see `ReplyReader`."""
        self.broker = Broker(open_async_connection(url), url, Keys(yard))
        self.keys = self.broker.keys
        self._submissions = Bursts(self._send)
        self._rate_limits = RateLimits(self.broker)
        self.reader = ReplyReader(self.broker, name)
        self.loop = self.reader.loop
        self.broker_time = BrokerTime()  # `YardHealth` measures it
        self._cancels: set[asyncio.Task[Cancelled]] = set()
        #: Connections close because the gateway stops.
        self.is_leaving = False

    async def start(self) -> None:
        """Connect."""
        await self.reader.start()

    async def stop(self) -> None:
        """Disconnect; requests go on."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=_CANCEL_S)
        await self.reader.stop()
        await self.broker.connection.aclose()

    async def has(self, request: Request) -> bool:
        """Whether a request with its name has been accepted before."""
        ledger = self.keys.ledger(request.client, request.id)
        return bool(await self.broker.command("EXISTS", ledger))

    async def ask(
        self, request: Request, context: RequestContext, media: Media | None = NO_MEDIA
    ) -> AsyncGenerator[Reply, None]:
        """Submit a request with its media, and yield all its replies from the first.

        Without ``media`` it is known to be on the queue, and its replies are read.
        Raises `GatewayError` where the queue refuses it. A caller that stops early cancels it,
        unless the request continues without its client.
        """
        stream = self.reader.follow(
            request.client,
            request.id,
            is_whole=request.params.n > 1 or has_logprobs(request),
            is_elsewhere=media is None,
        )
        is_over = False
        try:
            if media is None:
                await self.reader.look_at([stream])
            else:
                context.asked += 1
                acceptance = await self.submit(
                    request,
                    context.priority_class,
                    refuse_late=context.deadline_ms is not None and not context.is_patient,
                    before=context.take_unsaved(),
                    media=media,
                )
                with contextlib.suppress(TokenyardError):
                    context.rate_limits = await self._rate_limits.headers(
                        context.tenant, acceptance.eta_ms
                    )
                refused = refusal(acceptance)
                if refused is not None:
                    is_over = True
                    context.asked -= 1
                    raise refused
                await self.reader.accepted(stream, is_new=acceptance.code is Submitted.ACCEPTED)
            context.ticket.accept()
            async for reply in stream.until(self.give_up(context.deadline_ms)):
                is_over = reply.event == "result"
                yield reply
        except TimeoutError as error:
            message = "nobody ended the request at its deadline"
            raise GatewayError(504, message, code=Code.DEADLINE_EXCEEDED) from error
        finally:
            self.reader.forget(stream)
            goes_on = context.continues or (self.is_leaving and context.can_come_back)
            if not is_over and not goes_on:
                self.cancel_later(request, "the HTTP client disconnected")

    async def submit(
        self,
        request: Request,
        priority_class: PriorityClass,
        *,
        refuse_late: bool,
        before: Sequence[Command] = (),
        media: Media = NO_MEDIA,
    ) -> Acceptance:
        """Submit a request whose replies come to `reader`, at its interval or its tenant's.

        The commands ``before`` are carried out with it, and have their effect first. See `refusal`
        for the answer. Raises a `TokenyardError` where the broker does not answer.
        """
        interval_ms = request.stream_interval_ms
        if interval_ms is None and request.stream and request.tenant:
            settings = await self._rate_limits.settings(request.tenant)
            interval_ms = settings.stream_interval_ms or None
        request = replace(request, reply_to=self.reader.reply_to, stream_interval_ms=interval_ms)
        submission = _Submission(request, priority_class, refuse_late, before, media)
        return await self._submissions.ask(submission)

    async def _send(self, burst: Sequence[_Submission]) -> list[Acceptance]:
        """Submit requests of one moment, which share a round trip."""
        groups = defaultdict(list)
        for place, one in enumerate(burst):
            groups[one.priority_class, one.request.tenant, one.refuse_late].append(place)
        calls = [
            scripts.submit(
                self.keys,
                name,
                [burst[place].request for place in group],
                refuse_late=refuse_late,
                media=[burst[place].media for place in group],
            )
            for (name, _, refuse_late), group in groups.items()
        ]
        before = [command for one in burst for command in one.before]
        found = await self.broker.call_behind(before, calls)
        of_place = {
            place: answer
            for group, answers in zip(groups.values(), found, strict=True)
            for place, answer in zip(group, answers, strict=True)
        }
        return [of_place[place] for place in range(len(burst))]

    def give_up(self, deadline_ms: int | None) -> float | None:
        """When to end a request that should have ended: without a leader nobody else does."""
        if deadline_ms is None:
            return None
        ends_at = self.broker_time.to_monotonic(deadline_ms)
        return max(ends_at, clock.monotonic()) + _DEADLINE_MARGIN_S

    def cancel_later(self, request: Request, why: str) -> None:
        """Cancel in a task of its own: the caller may be being cancelled itself."""
        task = asyncio.create_task(self.cancel(request.client, request.id, why))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def cancel(self, client: str, request_id: str, reason: str) -> Cancelled:
        """Cancel a request wherever it is."""
        ledger = self.keys.ledger(client, request_id)
        with contextlib.suppress(TokenyardError):
            for _ in range(scripts.CANCEL_ATTEMPTS):
                seen = await self.broker.command("HMGET", ledger, *scripts.PLACE_FIELDS)
                state, where = scripts.place_of(seen)
                wanted = scripts.cancel(
                    self.keys, client, request_id, state=state, where=where, reason=reason
                )
                code = await self.broker.call(wanted)
                if code is not Cancelled.MOVED:
                    return code
        log.warning("could not cancel %s/%s", client, request_id)
        return Cancelled.MOVED


def has_logprobs(request: Request) -> bool:
    """Whether its answer has logprobs, which a ledger's tokens do not have."""
    params = request.params
    return params.logprobs is not None or params.logprob_token_ids is not None


def queue_full(retry_after_s: float) -> GatewayError:
    """The refusal of a request for which the queue has no room."""
    message = "the queue is full"
    return GatewayError(429, message, code=Code.QUEUE_FULL, retry_after_s=retry_after_s)


def refusal(acceptance: Acceptance) -> GatewayError | None:
    """Why the queue does not take a request; None where it does."""
    match acceptance.code:
        case Submitted.FULL:
            return queue_full(acceptance.retry_after_ms / 1000)
        case Submitted.QUOTA:
            return GatewayError(
                429,
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
                422, "this idempotency key was used for another request", code="ID_REUSED"
            )
        case _:
            return None


# What the limits of a tenant leave it, as the headers of OpenAI's API tell.

#: How long settings that were read are used: so long a changed limit is not told. It holds at once.
_TRUSTED_S: Final = 2.0
_MOST_CACHED: Final = 10_000
#: In which one request is likely to have left where no rate is known.
_SOON_MS: Final = 1_000

Header = tuple[bytes, bytes]


class Limit(NamedTuple):
    """What a limit of a tenant leaves it."""

    what: Literal["requests", "tokens"]
    most: int
    taken: int
    reset_ms: int

    def headers(self) -> list[Header]:
        """As the headers of OpenAI's API tell it."""
        told = {
            "limit": str(self.most),
            "remaining": str(max(0, self.most - self.taken)),
            "reset": duration(self.reset_ms),
        }
        return [
            (f"x-ratelimit-{name}-{self.what}".encode(), v.encode()) for name, v in told.items()
        ]


class RateLimits:
    """Reads limits and counts; a tenant without limits costs no command, but every few seconds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: dict[str, tuple[float, TenantSettings]] = {}

    async def headers(self, tenant: str, eta_ms: int) -> list[Header]:
        """The headers for a tenant, see `limits`."""
        return [header for limit in await self.limits(tenant, eta_ms) for header in limit.headers()]

    async def limits(self, tenant: str, eta_ms: int = -1) -> list[Limit]:
        """The limits of a tenant whose requests wait for about ``eta_ms`` (-1: unknown).

        Raises a `TokenyardError` where the broker does not answer.
        """
        settings = await self.settings(tenant) if tenant else DEFAULTS
        window = _window(settings)
        if window is None and not settings.max_waiting_requests:
            return []
        key, fields = self._broker.keys.tenant(tenant), (window or MINUTE).fields
        time, [waiting, *buckets] = await self._broker.carry_out(
            [("TIME",), ("HMGET", key, "waiting", *fields)]
        )
        found: list[Limit] = []
        if settings.max_waiting_requests:
            taken = max(0, whole(waiting))
            reset_ms = (eta_ms if eta_ms >= 0 else _SOON_MS) if taken else 0
            found.append(Limit("requests", settings.max_waiting_requests, taken, reset_ms))
        if window is not None:
            most = getattr(settings, window.limit)
            found.append(Limit("tokens", most, *window.read(buckets, unix_ms(time))))
        return found

    async def settings(self, tenant: str) -> TenantSettings:
        """Its settings, which may be two seconds old; raises a `TokenyardError`."""
        at, settings = self._known.get(tenant, (0.0, DEFAULTS))
        if clock.monotonic() - at <= _TRUSTED_S and at:
            return settings
        packed = await self._broker.command("HGET", self._broker.keys.tenants, tenant)
        known = decode_tenants({tenant.encode(): packed} if packed else {})
        settings = known.get(tenant, DEFAULTS)
        if len(self._known) >= _MOST_CACHED:
            self._known.clear()
        self._known[tenant] = clock.monotonic(), settings
        return settings


def _window(settings: TenantSettings) -> TokenWindow | None:
    if settings.tokens_per_minute:
        return MINUTE
    return DAY if settings.tokens_per_day else None


def duration(ms: int) -> str:
    """A time as OpenAI writes it: ``250ms``, ``1.5s``, ``6m0s``, ``2h0m3s``."""
    if ms < 1000:
        return f"{max(0, ms)}ms" if ms > 0 else "0s"
    seconds = ms / 1000
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if not minutes:
        return f"{seconds:g}s"
    rest = f"{minutes % 60}m{int(seconds % 60)}s"
    return f"{hours}h{rest}" if hours else rest


# One input of a task that pools: from what vLLM's front ends ask an engine to the wire. ``asked``
# has the fields of ``vllm.PoolingParams``, whichever version that is.

_CARRIED: Final = frozenset(PoolingParams.__struct_fields__) - {"truncate_prompt_tokens"}
#: With what stands elsewhere in a request, or is derived by the worker's engine.
_KNOWN: Final = _CARRIED | {"task", "requires_token_ids", "extra_kwargs", "output_kind"}
#: Where the second text of a pair begins.
_BOUNDARY: Final = "compressed_token_type_ids"
#: The front end has already cut the texts to these lengths.
_DONE: Final = ("max_tokens_per_query", "max_tokens_per_doc")


def wire_pooling(asked: Any) -> PoolingParams:
    """The parameters; raises `GatewayError` for one that the wire cannot carry."""
    for name in asked.__struct_fields__:
        if name not in _KNOWN and getattr(asked, name) is not None:
            raise invalid(name, "not carried through the queue")
    return msgspec.convert({name: getattr(asked, name) for name in _CARRIED}, PoolingParams)


def wire_input(ids: Sequence[int], asked: Any) -> Input:
    """The token ids, or those of a pair; raises `GatewayError` as above."""
    extra = dict(asked.extra_kwargs or {})
    boundary = extra.pop(_BOUNDARY, 0)
    for name in _DONE:
        extra.pop(name, None)
    if extra:
        raise invalid(min(extra), "not carried through the queue")
    prompt = list[Any](ids)
    return [prompt[:boundary], prompt[boundary:]] if 0 < boundary < len(prompt) else prompt
