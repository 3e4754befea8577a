"""The gateway as an ASGI application: who asks, for which model, under which id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.batches.api import BatchesApi, is_of_batches, no_storage
from gateway.batches.storage import Storage
from gateway.frontend.models import STATE, FrontEnds
from gateway.http.anthropic import MessagesAnswer, is_of_messages
from gateway.http.board import ROOT as BOARD
from gateway.http.board import is_of_board
from gateway.http.body_errors import BodyErrors
from gateway.http.context import CURRENT, RequestContext
from gateway.http.errors import GatewayError, methods_of, moved, no_endpoint, unavailable
from gateway.http.incoming import (
    BODY,
    Bodies,
    read_choice,
    read_deadline,
    read_event_id,
    refuse_beam_search,
    replay,
    require_json,
    too_large,
)
from gateway.http.open_answer import OpenAnswer, stopping
from gateway.http.openapi import OpenApiDocument
from gateway.http.principal import Principal, PrincipalLookup
from gateway.http.records import Records, durable_id, fingerprint
from gateway.http.sse import Answer, send_body, send_error
from gateway.listing import ModelList, find_model
from gateway.metrics import GatewayMetrics
from gateway.models import ModelWatch
from gateway.queue.calls import Command
from gateway.queue.health import YardHealth
from gateway.queue.yard import YardQueue
from gateway.responses.api import UNDER as UNDER_RESPONSES
from gateway.responses.api import ResponsesApi
from tokenyard import __version__, clock
from tokenyard.process.http_guard import SiteGuard
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.wire import DEFAULT_RESULT_TTL_S
from tokenyard.telemetry.endpoint import PLAIN

if TYPE_CHECKING:
    from tokenyard.board.app import Board

log = logging.getLogger("tokenyard.gateway")

#: Endpoints that generate, and those that only render.
GENERATING: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
RENDERING: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
OPENAPI: Final = "/openapi.json"
#: The paths that metrics name.
ENDPOINTS: Final = (
    GENERATING
    | RENDERING
    | {*("/v1/models", "/v1/files", "/v1/batches", "/health", "/livez", OPENAPI, BOARD)}
)
ONE_MODEL: Final = "/v1/models/"
_FAILED: Final = "the gateway has failed at this request; its log says why"


class Gateway:
    """Routes each request to vLLM's front end of the model that it names."""

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
        self._records = Records(queue)
        self._bodies = Bodies(settings)
        self._principals = PrincipalLookup(queue, needs_key=settings.needs_keys)
        # No page of another site has a key: then any name will do, such as a pod's.
        hosts = None if settings.needs_keys else (settings.own_name, *settings.hosts)
        self._sites = SiteGuard.of(hosts, settings.origins)
        self._api: ASGIApp = self._answered
        if settings.origins:
            self._api = CORSMiddleware(
                self._answered,
                allow_origins=settings.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        self._watch = models
        self._list = ModelList(models, front_ends)
        self._responses = ResponsesApi(settings, queue, front_ends, models, self._bodies)
        self._batches = None if storage is None else BatchesApi(settings, storage, self._bodies)
        self._openapi = OpenApiDocument(needs_key=settings.needs_keys)
        self._health_of_yard = health
        self._open: set[OpenAnswer] = set()
        self.metrics = GatewayMetrics(ENDPOINTS, lambda: len(self._open))
        #: Takes nothing new.
        self.is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._probes: dict[tuple[str, str], Callable[[], Awaitable[bytes]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/livez"): self._live,
            ("GET", "/version"): self._version,
        }

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
        answer = OpenAnswer(self._counted(named, BOARD if is_of_board(path) else path))
        self._open.add(answer)
        self._is_idle.clear()
        try:
            await self._serve(scope, receive, answer.send, path)
        except GatewayError as error:
            await send_error(answer.send, error)
        except TokenyardError as error:
            await send_error(answer.send, unavailable(str(error)))
        except Exception:
            if not answer.has_begun:
                await send_error(answer.send, GatewayError(500, "server_error", _FAILED))
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

    async def _serve(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        method, headers = scope["method"], Headers(scope=scope)
        board = self._board if is_of_board(path) else None
        if board is None:  # it has a guard of its own
            self._refuse_other_sites(scope, headers)
        probe = self._probes.get((method, path))
        if probe is not None:
            await send_body(send, 200, await probe())
            return
        if (method, path) == ("GET", "/metrics") and not self._settings.needs_keys:
            await send_body(send, 200, self.metrics.text(), kind=PLAIN.encode())
            return
        if self.is_draining:
            raise stopping()
        if board is not None:
            await board.app(scope, receive, send)
            return
        bare = path.rstrip("/")
        if bare != path and methods_of(bare):
            raise moved(bare, scope["query_string"].decode("latin-1"))
        await self._serve_principal(scope, receive, send, path)

    async def _serve_principal(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Serve what belongs to somebody; raises `GatewayError`."""
        method = scope["method"]
        principal = await self._principals.find(Headers(scope=scope))
        if method == "GET" and path == "/v1/models":
            listed = await self._list.all(principal.may_use)
            await send_body(send, 200, json.dumps(listed).encode())
        elif method == "GET" and path == OPENAPI:
            await send_body(send, 200, await self._openapi.read())
        elif method == "GET" and path.startswith(ONE_MODEL):
            card = await self._list.one(path.removeprefix(ONE_MODEL), principal.may_use)
            await send_body(send, 200, json.dumps(card).encode())
        elif method == "POST" and path in GENERATING | RENDERING:
            await self._answer(scope, receive, send, path, principal)
        elif path.startswith(UNDER_RESPONSES):
            await self._responses.serve(scope, receive, send, principal.client)
        elif is_of_batches(path):
            if self._batches is None:
                raise no_storage()
            await self._batches.serve(scope, receive, send, principal)
        else:
            raise no_endpoint(method, path, meant_endpoint(path))

    def _refuse_other_sites(self, scope: Scope, headers: Headers) -> None:
        is_tls = scope["scheme"] == "https"
        refusal = self._sites.refusal(scope["method"], headers, is_tls=is_tls)
        if refusal is not None:
            kind = "invalid_request_error" if refusal.status == 400 else "permission_error"
            raise GatewayError(refusal.status, kind, refusal.why)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, path: str, principal: Principal
    ) -> None:
        headers = Headers(scope=scope)
        require_json(headers)
        client = principal.tenant or principal.client
        raw = await self._bodies.read(receive, client)
        if path in RENDERING and len(raw) > self._settings.max_tokenize_bytes:
            raise too_large(self._settings.max_tokenize_bytes)
        parsed = await self._bodies.parse(raw, client)
        scope, body = {**scope, BODY: parsed}, parsed.value
        profile = find_model(self._watch, body, principal.may_use)
        state = await self._front_ends.state_of(profile)
        STATE.set(state)
        if path in RENDERING:
            errors = BodyErrors(send, path, lambda: False)
            await self._render(scope, replay(raw, receive), errors.send, errors)
            return
        refuse_beam_search(body)
        self._health_of_yard.check()
        context, after = await self._context(headers, path, body, principal)

        has_key = context.is_first and not context.unsaved

        async def free_key() -> None:
            nonlocal has_key
            if has_key and not context.asked:
                has_key = False  # from now on it may be another's
                await self._records.forget(context.client, context.durable_id)

        async def freeing(message: Message) -> None:
            # Before the refusal is seen: its client may come again at once.
            if message["type"] == "http.response.start" and message["status"] >= 400:
                await free_key()
            await send(message)

        try:
            await self._generate(
                scope, replay(raw, receive), freeing, body, profile.name, context, after
            )
        finally:
            await free_key()

    async def _generate(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: dict[str, Any],
        model: str,
        context: RequestContext,
        after: int,
    ) -> None:
        path = scope["path"]
        if path == "/v1/responses":
            create = self._responses.create
            await create(scope, receive, send, body, model, context, after)
            return
        CURRENT.set(context)
        keep_alive_s = self._settings.keep_alive_s
        errors = BodyErrors(send, path, context.ticket.decided.is_set)
        answer = Answer(errors.send, context, path, after=after, keep_alive_s=keep_alive_s)
        inner = {**scope, "headers": _with_request_id(scope, context.durable_id)}
        try:
            await self._render(inner, receive, answer.send, errors, answer)
        finally:
            answer.close()

    async def _render(
        self, scope: Scope, receive: Receive, send: Send, *replacing: Answer | BodyErrors
    ) -> None:
        """Call vLLM's app, which does not know when its answer was replaced."""
        try:
            await self._front_ends.app(scope, receive, send)
        except Exception:
            if not any(one.is_replaced for one in replacing):
                raise

    async def _context(
        self, headers: Headers, path: str, body: dict[str, Any], principal: Principal
    ) -> tuple[RequestContext, int]:
        """The request's own record and options, and the last event that the client has."""
        client = principal.client
        priority_class = principal.choose_class(body)
        key = headers.get("idempotency-key")
        # What can be refused comes first: a key should not belong to what was refused.
        has_ids = read_choice(headers, "X-Tokenyard-Event-Ids", "on", "off") == "on"
        choices = ("continue", "cancel")
        usual = reversed(choices) if key is None else choices
        rule = read_choice(headers, "X-Tokenyard-On-Disconnect", *usual)
        deadline_ms = read_deadline(headers, body, self._queue.broker_time.now_ms)
        name, after, is_first = durable_id(client, key), 0, True
        unsaved: list[Command] = []
        print_ = fingerprint(path, body)
        keep_s = DEFAULT_RESULT_TTL_S if key is None else self._settings.record_ttl_s
        if "last-event-id" in headers:
            name, after = read_event_id(headers["last-event-id"])
            record, is_first = await self._records.find(client, name, print_), False
        elif key is None:
            record, saving = self._records.begin(client, name, print_, keep_s)
            unsaved = [saving]
        else:
            record, is_first = await self._records.open(client, name, print_, keep_s)
        return RequestContext(
            durable_id=record.durable_id,
            client=client,
            created=record.created_ms / 1000,
            tenant=principal.tenant,
            priority_class=priority_class,
            may_go_first=principal.may_go_first,
            deadline_ms=deadline_ms,
            continues=rule == "continue",
            can_come_back=key is not None or (has_ids and bool(body.get("stream"))),
            keep_s=keep_s,
            has_event_ids=has_ids,
            is_first=is_first,
            unsaved=unsaved,
        ), after

    async def _health(self) -> bytes:
        if self.is_draining:
            raise stopping()
        self._health_of_yard.check()
        return b"{}"

    async def _live(self) -> bytes:
        if lost := self._health_of_yard.lost:
            raise unavailable(lost)
        return b"{}"

    async def _version(self) -> bytes:
        return json.dumps({"version": self._front_ends.version, "tokenyard": __version__}).encode()


def meant_endpoint(path: str) -> str:
    """The endpoint of a client whose base URL has one `/v1` too few or too many, else ""."""
    return next((one for one in (f"/v1{path}", path.removeprefix("/v1")) if one in ENDPOINTS), "")


def _named(send: Send, scope: Scope) -> Send:
    """Answers have the client's own name of a request (`X-Request-Id`), where there is one."""
    given = [(name, value) for name, value in scope["headers"] if name == b"x-request-id"][:1]

    def naming(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            others = [one for one in message.get("headers", ()) if one[0] != b"x-request-id"]
            message["headers"] = [*others, *given]
        return send(message)

    return naming if given else send


def _with_request_id(scope: Scope, name: str) -> list[tuple[bytes, bytes]]:
    kept = [one for one in scope["headers"] if one[0] != b"x-request-id"]
    return [*kept, (b"x-request-id", name.encode())]
