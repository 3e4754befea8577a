"""Whether a request may pass to the front end, for a proxy that asks before it (auth_request).

A proxy reads bodies, holds connections and streams answers; it asks here with the headers alone. A
request that may pass gets the id that says who asks, and the rest of the way knows no keys.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import Final

import uvicorn
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.bridge.requests import Caller, id_of
from gateway.http.errors import GatewayError, unavailable
from gateway.http.incoming import read_deadline, read_interval
from gateway.http.principal import PrincipalLookup
from gateway.http.records import durable_id
from gateway.queue.health import YardHealth
from gateway.queue.yard import RateLimits, YardQueue, queue_full
from tokenyard import clock
from tokenyard.broker.tasks import BackgroundLoop
from tokenyard.process.http_server import QuietServer
from tokenyard.protocol.errors import Code, TokenyardError
from tokenyard.protocol.streams import whole

log = logging.getLogger("tokenyard.bridge")

#: The path of a refusal as the proxy's client gets it; each other path answers the proxy.
REFUSED: Final = "/refused"
_HOST: Final = "127.0.0.1"
#: Time between two looks at the queue.
_LOOK_S: Final = 0.2
_FULL_AGAIN_S: Final = 1.0
_STOP_S: Final = 2.0


class KeyCheck:
    """Answers a proxy, as an ASGI application."""

    def __init__(
        self, queue: YardQueue, health: YardHealth, model: str, id_prefix: str, port: int
    ) -> None:
        self._queue = queue
        self._health = health
        self._model = model
        self._id_prefix = id_prefix
        self._principals = PrincipalLookup(queue, needs_key=True)
        self._limits = RateLimits(queue.broker)
        self._is_full = False
        self.loop = BackgroundLoop(self._look, "looking at the queue", log)
        self._listener = socket.create_server((_HOST, port))
        config = uvicorn.Config(self, log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = QuietServer(config)

    async def start(self) -> None:
        """Listen; raises `SettingsError` where that fails."""
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        self.loop.start()

    async def stop(self) -> None:
        """End."""
        await self.loop.stop()
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=_STOP_S)

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        body, status, headers = b"", 204, []
        try:
            name = await self._admit(Headers(scope=scope))
            headers.append((b"x-request-id", name.encode()))
        except (GatewayError, TokenyardError) as error:
            refusal = error if isinstance(error, GatewayError) else unavailable(str(error))
            status, body = 401, refusal.body()  # the only status that a proxy understands
            if scope["path"] == REFUSED:
                status = refusal.status
                given = {"content-type": "application/json", **refusal.headers}
                headers = [(name.encode(), value.encode()) for name, value in given.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _admit(self, headers: Headers) -> str:
        """The id of a request; raises `GatewayError` or a `TokenyardError` where it is refused."""
        principal = await self._principals.find(headers)
        if not principal.may_use(self._model):
            raise GatewayError(403, f"this key may not use the model {self._model!r}")
        priority_class = principal.choose_class({})
        caller = Caller(
            principal.tenant,
            priority_class,
            read_interval(headers, principal.stream_interval_ms or None),
            read_deadline(headers, {}, self._queue.broker_time.now_ms),
        )
        key = headers.get("idempotency-key")
        if key is None:
            name = secrets.token_hex(16)
        else:
            name = f"{self._id_prefix}{durable_id(principal.client, key)}"
        self._health.check()
        if self._is_full:
            raise queue_full(_FULL_AGAIN_S)
        for limit in await self._limits.limits(principal.tenant):
            if limit.taken >= limit.most:
                message = f"{limit.what}: {limit.taken} of {limit.most} are taken"
                again_s = limit.reset_ms / 1000
                raise GatewayError(429, message, code=Code.QUOTA_EXCEEDED, retry_after_s=again_s)
        return id_of(caller, name)

    async def _look(self) -> None:
        """See whether the queue is full, as far as no class or tenant has room of its own."""
        await clock.pause(_LOOK_S)
        keys = self._queue.keys
        *lengths, others, [most] = await self._queue.broker.carry_out(
            [
                *(("XLEN", keys.intake(name)) for name in ("retry", "high", "normal", "low")),
                ("HGET", keys.tally, "tenants_waiting"),
                ("HMGET", keys.info, "max_num_queued_reqs"),  # as the user `gateway` may
            ]
        )
        self._is_full = 0 < whole(most) <= sum(lengths) + max(0, whole(others))
