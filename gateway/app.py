"""The gateway as an ASGI application: who asks, for what, and how the answer is counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import generation
from gateway.batches import api as batches
from gateway.batches.storage import Storage
from gateway.frontend.models import FrontEnds
from gateway.http.errors import GatewayError, MessagesAnswer, is_of_messages, unavailable
from gateway.http.incoming import Bodies
from gateway.http.openapi import OpenApiDocument
from gateway.http.principal import PrincipalLookup
from gateway.http.records import Records
from gateway.http.routes import Call, Endpoint, Router, Routes
from gateway.http.sse import OpenAnswer, send_body, send_error, stopping
from gateway.metrics import OTHER, GatewayMetrics
from gateway.models import ModelWatch
from gateway.queue.health import YardHealth
from gateway.queue.yard import YardQueue
from gateway.responses import api as responses
from tokenyard import __version__, clock
from tokenyard.process.http_guard import SiteGuard
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.telemetry.endpoint import PLAIN

if TYPE_CHECKING:
    from tokenyard.board.app import Board

log = logging.getLogger("tokenyard.gateway")

_FAILED: Final = "the gateway has failed at this request; its log says why"
#: Where the board is; also its name in the metrics.
_BOARD: Final = "/board"
routes = Routes()


class Gateway:
    """Serves each request that its sender may make by the handler of its route."""

    def __init__(
        self,
        settings: GatewaySettings,
        queue: YardQueue,
        front_ends: FrontEnds,
        models: ModelWatch,
        health: YardHealth,
        storage: Storage | None = None,
        board: Board | None = None,
    ) -> None:
        self._settings = settings
        self._board = board
        self._queue = queue
        self._front_ends = front_ends
        self._principals = PrincipalLookup(queue, needs_key=settings.needs_keys)
        # No page of another site has a key: then any name will do, such as a pod's.
        hosts = None if settings.needs_keys else (settings.own_name, *settings.hosts)
        self._sites = SiteGuard(hosts, settings.origins)
        self._api: ASGIApp = self._answered
        if settings.origins:
            self._api = CORSMiddleware(
                self._answered,
                allow_origins=settings.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        self._models = models
        self._health = health
        self._open: set[OpenAnswer] = set()
        self.metrics = GatewayMetrics(lambda: len(self._open))
        self._router = Router()
        bodies = Bodies(settings)
        stored = responses.ResponsesApi(settings, queue, front_ends, models, bodies)
        records = Records(queue)
        generating = generation.GenerationApi(
            settings, queue, front_ends, models, health, bodies, stored, records
        )
        self._router.add(generation.routes, partial(getattr, generating))
        self._router.add(responses.routes, partial(getattr, stored))
        files = batches.BatchesApi(settings, storage, bodies) if storage else None
        self._router.add(batches.routes, files.handler if files else batches.no_storage)
        # With keys, metrics are only at their own port.
        own = [one for one in routes if one.path != "/metrics" or not settings.needs_keys]
        self._router.add(own, partial(getattr, self))
        self._openapi = OpenApiDocument(self._router.routes, needs_key=settings.needs_keys)
        #: Takes nothing new.
        self.is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; see the ASGI specification."""
        if scope["type"] == "http":
            app = self._answered if is_of_board(scope["path"]) else self._api
            await app(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it, and answer what it raises."""
        path = scope["path"]
        outermost = MessagesAnswer(send).send if is_of_messages(path) else send
        named = _named(outermost, scope)
        endpoint, params = self._router.find(path)
        shown = endpoint.path if endpoint else _BOARD if is_of_board(path) else OTHER
        answer = OpenAnswer(self._counted(named, shown))
        self._open.add(answer)
        self._is_idle.clear()
        try:
            await self._serve(Call(scope, receive, answer.send, params=params), endpoint)
        except GatewayError as error:
            await send_error(answer.send, error)
        except TokenyardError as error:
            await send_error(answer.send, unavailable(str(error)))
        except Exception:
            if not answer.has_begun:
                await send_error(answer.send, GatewayError(500, _FAILED))
            raise
        finally:
            self._open.discard(answer)
            if not self._open:
                self._is_idle.set()

    def _counted(self, send: Send, path: str) -> Send:
        began = clock.monotonic()

        def counting(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self.metrics.answered(path, message["status"], clock.monotonic() - began)
                if self.is_draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            return send(message)

        return counting

    def drain(self) -> None:
        """Take nothing new, and end the streams of open pages of the board."""
        self.is_draining = True
        if self._board is not None:
            self._board.end_streams()

    async def drained(self, most_s: float) -> None:
        """Wait until no answer is under way, for a time at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), most_s)

    async def interrupt(self, most_s: float) -> None:
        """End all answers under way, for clients to come back for; some do not read."""
        self._queue.is_leaving = True
        if self._open:
            ends = [asyncio.create_task(one.interrupt()) for one in self._open]
            await asyncio.wait(ends, timeout=most_s)

    async def _serve(self, call: Call, endpoint: Endpoint | None) -> None:
        method, path = call.scope["method"], call.path
        board = self._board if is_of_board(path) else None
        if board is None:  # it has a guard of its own
            self._refuse_other_sites(call.scope, call.headers)
        route, handler = (endpoint and endpoint.served.get(method)) or (None, None)
        if route is not None and handler is not None and route.is_open:
            await handler(call)
            return
        if self.is_draining:
            raise stopping()
        if board is not None:
            await board.app(call.scope, call.receive, call.send)
            return
        self._router.redirect(call.scope)
        principal = await self._principals.find(call.headers)
        if handler is None:
            raise self._router.refusal(method, path)
        await handler(replace(call, principal=principal))

    def _refuse_other_sites(self, scope: Scope, headers: Headers) -> None:
        is_tls = scope["scheme"] == "https"
        refusal = self._sites.refusal(scope["method"], headers, is_tls=is_tls)
        if refusal is not None:
            kind = "invalid_request_error" if refusal.status == 400 else "permission_error"
            raise GatewayError(refusal.status, refusal.why, kind=kind)

    @routes("GET /v1/models", "models", answer="ModelCards")
    async def list_models(self, call: Call) -> None:
        """List the models and adapters that the key may use, loaded or not."""
        await call.answer(await self._models.cards(call.principal.may_use))

    @routes("GET /v1/models/{model:path}", "models", answer="ModelCard")
    async def retrieve_model(self, call: Call) -> None:
        """Describe one model or adapter."""
        await call.answer(await self._models.card(call.params["model"], call.principal.may_use))

    @routes("GET /health", "probes", answer="AnyObject", is_open=True)
    async def health(self, call: Call) -> None:
        """200 if the broker answers, a coordinator leads, and the gateway is not stopping."""
        if self.is_draining:
            raise stopping()
        self._health.check()
        await call.answer({})

    @routes("GET /livez", "probes", answer="AnyObject", is_open=True)
    async def livez(self, call: Call) -> None:
        """200 while the process serves."""
        if lost := self._health.lost:
            raise unavailable(lost)
        await call.answer({})

    @routes("GET /version", "probes", answer="Versions", is_open=True)
    async def version(self, call: Call) -> None:
        """The versions of vLLM and of Tokenyard."""
        await call.answer({"version": self._front_ends.version, "tokenyard": __version__})

    @routes("GET /metrics", "probes", media_type="text/plain", is_open=True)
    async def metrics_text(self, call: Call) -> None:
        """The gateway's metrics."""
        await send_body(call.send, 200, self.metrics.text(), kind=PLAIN.encode())

    @routes("GET /openapi.json", "probes", answer="AnyObject")
    async def openapi(self, call: Call) -> None:
        """Return this document."""
        await send_body(call.send, 200, await self._openapi.read())


def is_of_board(path: str) -> bool:
    """Whether this is a path of the board."""
    return path.startswith(f"{_BOARD}/") or path == _BOARD


def _named(send: Send, scope: Scope) -> Send:
    """Answers have the client's own name of a request (`X-Request-Id`), where there is one."""
    given = [(name, value) for name, value in scope["headers"] if name == b"x-request-id"][:1]

    def naming(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            others = [one for one in message.get("headers", ()) if one[0] != b"x-request-id"]
            message["headers"] = [*others, *given]
        return send(message)

    return naming if given else send
