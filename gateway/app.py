"""The gateway as an ASGI application: who asks, for which model, under which id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from gateway.context import CURRENT, RequestContext
from gateway.errors import GatewayError
from gateway.frontend.models import STATE, FrontEnds
from gateway.models import ModelWatch
from gateway.profile import ModelProfile
from gateway.queue.health import YardHealth
from gateway.queue.yard import YardQueue
from gateway.records import Records, durable_id, fingerprint
from gateway.sse import Answer, send_body, send_error
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.gateway_settings import GatewaySettings

log = logging.getLogger("tokenyard.gateway")

#: Endpoints that generate, and those that only render.
GENERATING: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
RENDERING: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
_KEY_HEADERS: Final = ("idempotency-key", "x-request-id")


class Gateway:
    """Routes each request to vLLM's front end of the model that it names."""

    def __init__(
        self,
        settings: GatewaySettings,
        queue: YardQueue,
        front_ends: FrontEnds,
        models: ModelWatch,
        health: YardHealth,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._front_ends = front_ends
        self._records = Records(queue, settings.record_ttl_s)
        self._callers = CallerLookup(queue, needs_key=settings.needs_keys)
        self._watch = models
        self._health_of_yard = health
        self._under_way = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._own: dict[tuple[str, str], Callable[[], Awaitable[bytes]]] = {
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/livez"): self._live,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; see the ASGI specification."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        self._under_way += 1
        self._is_idle.clear()
        try:
            await self._serve(scope, receive, send, path)
        except GatewayError as error:
            await send_error(send, error, path)
        except TokenyardError as error:
            unavailable = GatewayError(
                503, "service_unavailable_error", str(error), retry_after_s=1.0
            )
            await send_error(send, unavailable, path)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()

    async def drained(self, most_s: float) -> None:
        """Wait until no answer is under way, for a time at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), most_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        own = self._own.get((scope["method"], path))
        if own is not None:
            await send_body(send, 200, await own())
        elif scope["method"] == "POST" and path in GENERATING | RENDERING:
            await self._answer(scope, receive, send, path)
        else:
            raise GatewayError(404, "not_found_error", f"there is no {scope['method']} {path}")

    async def _answer(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        raw = await read_body(receive, self._settings.max_body_bytes)
        body = parse_body(raw)
        profile = self._find_model(body)
        state = await self._front_ends.state_of(profile)
        STATE.set(state)
        if path in RENDERING:
            await self._front_ends.app(scope, replay(raw, receive), send)
            return
        self._health_of_yard.check()
        headers = Headers(scope=scope)
        context, after = await self._context(headers, path, body)
        CURRENT.set(context)
        answer = Answer(
            send,
            context,
            path,
            after=after,
            has_ids=read_choice(headers, "X-Tokenyard-Event-Ids", "on", "off") == "on",
            keep_alive_s=self._settings.keep_alive_s,
        )
        inner = {**scope, "headers": _with_request_id(scope, context.durable_id)}
        if path == "/v1/responses":
            raw = json.dumps(body | {"request_id": f"resp_{context.durable_id}"}).encode()
            inner["headers"] = [one for one in inner["headers"] if one[0] != b"content-length"]
        try:
            await self._front_ends.app(inner, replay(raw, receive), answer.send)
        except Exception:
            # vLLM's app does not know that its answer was replaced.
            if not answer.is_replaced:
                raise
        finally:
            answer.close()

    async def _context(
        self, headers: Headers, path: str, body: dict[str, Any]
    ) -> tuple[RequestContext, int]:
        """The request's own record and options, and the last event that the client has."""
        client = "http"
        key = next((headers[name] for name in _KEY_HEADERS if name in headers), None)
        name, after = durable_id(client, key), 0
        print_ = fingerprint(path, body)
        if "last-event-id" in headers:
            name, after = read_event_id(headers["last-event-id"])
            record = await self._records.find(client, name, print_)
        else:
            record = await self._records.open(client, name, print_)
        choices = ("continue", "cancel")
        usual = choices if "idempotency-key" in headers else reversed(choices)
        wish = read_choice(headers, "X-Tokenyard-On-Disconnect", *usual)
        return RequestContext(
            durable_id=record.durable_id,
            client=client,
            created=record.created_ms / 1000,
            deadline_ms=read_deadline(headers),
            continues=wish == "continue",
        ), after

    def _find_model(self, body: dict[str, Any]) -> ModelProfile:
        name = body.get("model")
        if name is None and len(self._watch.profiles) == 1:
            return next(iter(self._watch.profiles.values()))
        if not isinstance(name, str):
            raise GatewayError(400, "invalid_request_error", "name a model", param="model")
        profile = self._watch.profiles.get(name)
        if profile is None:
            message = f"the model {name!r} does not exist; see GET /v1/models"
            raise GatewayError(
                404, "not_found_error", message, param="model", code="model_not_found"
            )
        return profile

    async def _models(self) -> bytes:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "tokenyard"}
            for name in self._watch.profiles
        ]
        return json.dumps({"object": "list", "data": data}).encode()

    async def _health(self) -> bytes:
        self._health_of_yard.check()
        if self._queue.is_draining:
            raise GatewayError(503, "service_unavailable_error", "this gateway is stopping")
        return b"{}"

    async def _live(self) -> bytes:
        return b"{}"


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body; raises `GatewayError` where it is too large or the client is gone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GatewayError(499, "invalid_request_error", "the client disconnected")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise GatewayError(
                413, "invalid_request_error", f"the body has more than {limit} bytes"
            )
        if not message.get("more_body", False):
            return b"".join(parts)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; raises `GatewayError`."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, "invalid_request_error", f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise GatewayError(400, "invalid_request_error", "the body is no JSON object")
    return body


def replay(raw: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then what the connection brings."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return again


def read_event_id(text: str) -> tuple[str, int]:
    """Durable id and number of an event; raises `GatewayError`."""
    name, _, number = text.partition(":")
    if len(name) != 32 or not number.isascii() or not number.isdecimal() or len(number) > 9:
        raise GatewayError(
            400, "invalid_request_error", "Last-Event-ID: this is no id of an event of this server"
        )
    return name, int(number)


def read_choice(headers: Headers, name: str, usual: str, other: str) -> str:
    """One of two values of a header; raises `GatewayError`."""
    given = headers.get(name, usual)
    if given not in (usual, other):
        message = f"{name}: give `{usual}` or `{other}`"
        raise GatewayError(400, "invalid_request_error", message, param=name)
    return given


def read_deadline(headers: Headers) -> int | None:
    """Unix ms after which the answer is of no use; raises `GatewayError`."""
    given = headers.get("x-request-timeout-ms")
    if given is None:
        return None
    if not given.isascii() or not given.isdecimal() or not 0 < int(given) < 10**10:
        raise GatewayError(
            400, "invalid_request_error", "X-Request-Timeout-Ms: give a number of milliseconds"
        )
    return time.time_ns() // 1_000_000 + int(given)


def _with_request_id(scope: Scope, name: str) -> list[tuple[bytes, bytes]]:
    kept = [one for one in scope["headers"] if one[0] != b"x-request-id"]
    return [*kept, (b"x-request-id", name.encode())]
