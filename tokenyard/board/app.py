"""The board as an ASGI application: pages, their live blocks, and actions.

A request passes the guard (`guard`: where it comes from), the door (`access`: who asks, in which
role) and only then reads or changes anything. Pages read in threads, so that a gateway that serves
the board continues meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenyard import clock
from tokenyard.board.access import Door
from tokenyard.board.forms import ROOT, read_back, read_form, read_query, with_done
from tokenyard.board.guard import Guard, nonce_of
from tokenyard.board.operations import OPERATIONS, as_first_asked, ask, ask_again, form_of, run
from tokenyard.board.page import Actor, NotFound, Page, Parameters
from tokenyard.board.pages import PAGES
from tokenyard.board.reading import Busy, YardReader
from tokenyard.board.rendering import Templates
from tokenyard.board.settings import BoardOptions
from tokenyard.ops.audit import AuditEntry, find_entry
from tokenyard.ops.operation import Operation
from tokenyard.protocol.errors import BrokerUnavailable, Refused, TokenyardError
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import unix_ms

log = logging.getLogger("tokenyard.board")

#: How long after an action a page says what was done.
_TOLD_MS: Final = 60_000
#: The status of an answer by the error that it tells.
_STATUSES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (Refused, 400),
    (NotFound, 404),
    (Busy, 429),
    (BrokerUnavailable, 503),
    (TokenyardError, 502),
)


class Board:
    """The board of one yard. ``app`` serves all paths under `ROOT`."""

    def __init__(self, options: BoardOptions, redis_url: str, yard: str) -> None:
        self._options = options
        self._reader = YardReader(
            redis_url, yard, most_at_once=options.max_reads, wait_s=options.wait_s
        )
        self._templates = Templates()
        self._door = Door(options, self._reader, yard, self._show)
        self._streams = LiveStreams(options)
        self._yard_name = yard
        pages = [Route(page.path, partial(self._page, page=page)) for page in PAGES]
        actions = [
            Route(f"/do/{name}", partial(self._operation, op=op), methods=["GET", "POST"])
            for name, op in OPERATIONS.items()
        ]
        static = Mount("/static", _Static(packages=[("tokenyard.board", "static")]))
        inner = [*self._door.routes(), *actions, static, *pages]
        inner.append(Route("/{rest:path}", self._nothing))
        # Its own redirects would name the host that the client has given.
        under = Router(inner, redirect_slashes=False)
        starlette = Starlette(
            routes=[Route(ROOT, _to_root), Mount(ROOT, under)],
            exception_handlers={kind: self._refused for kind, _ in _STATUSES}
            | {Exception: self._failed},
        )
        starlette.router.redirect_slashes = False
        self.app: ASGIApp = Guard(starlette, options)

    def end_streams(self) -> None:
        """End the live streams and take no more, before the server stops."""
        self._streams.end()

    def close(self) -> None:
        """Close its connections; idempotent."""
        self._reader.close()

    async def _page(self, request: Request, page: Page) -> Response:
        actor = await self._door.enter(request, page.role)
        if isinstance(actor, Response):
            return actor
        given = Parameters(read_query(request), actor)
        if request.method == "GET" and EVENTS in request.headers.get("accept", ""):
            return self._live(request, page, given)
        context = await self._context(request, page, given)
        context["done"] = await self._done(given)
        return HTMLResponse(self._templates.page(page.template, context))

    def _live(self, request: Request, page: Page, given: Parameters) -> Response:
        """The live blocks, each when it changes, as server-sent events."""

        async def blocks() -> dict[str, str] | None:
            try:
                # Not only when it begins: a key may have been revoked.
                if await self._door.enter(request, page.role) != given.actor:
                    return None
                context = await self._context(request, page, given)
            except (TokenyardError, Busy, NotFound, Refused) as error:
                return {"live_error": str(error)}
            return {**self._templates.live_blocks(page.template, context), "live_error": ""}

        return self._streams.answer(blocks, page.every_s)

    async def _context(self, request: Request, page: Page, given: Parameters) -> dict[str, Any]:
        """What the page's template shows. Who looks in the same role sees the same."""
        actor = replace(given.actor, name="")
        values = {name: found for name, found in given.values.items() if name != "done"}
        asked = tuple((name, tuple(found)) for name, found in sorted(values.items()))
        shared = Parameters(values, actor)
        key = (page.path, asked, actor)
        found = await self._reader.shared(key, lambda yard: page.view(yard, shared))
        return {**self._common(request), "page": page, **found}

    def _common(self, request: Request) -> dict[str, Any]:
        """What every template can use."""
        return {
            "root": ROOT,
            "yard_name": self._yard_name,
            "menu": PAGES,
            "actor": getattr(request.state, "actor", None),
            "nonce": nonce_of(request.scope),
            "done": None,
            "back": getattr(request.state, "back", ""),
            "needs_keys": self._options.needs_keys,
        }

    async def _done(self, given: Parameters) -> AuditEntry | None:
        """The action that led here, to say what has happened: the actor's own, just now."""
        entry = given.text("done")
        if not entry:
            return None
        return await self._reader.run(lambda yard: _just_done(yard, entry, given.actor))

    async def _operation(self, request: Request, op: Operation) -> Response:
        """GET asks whether to do it, POST does it."""
        actor = await self._door.enter(request, op.role)
        if isinstance(actor, Response):
            return actor
        if request.method == "POST":
            return await self._run(request, op, actor)
        given = Parameters(read_query(request), actor)
        request.state.back = read_back(given)
        form = await self._reader.run(lambda yard: form_of(op, yard, given))
        return self._show(request, "ask.html", ask(op, form, given), 200)

    async def _run(self, request: Request, op: Operation, actor: Actor) -> Response:
        given = Parameters(await read_form(request), actor)
        back = request.state.back = read_back(given)
        try:
            done = await self._reader.run(lambda yard: run(op, yard, given))
        except Refused as error:
            return await self._asked_again(request, op, given, error)
        finally:
            self._reader.forget()
        if done.outcome.secret:
            context = {"action": op, "back": back, "outcome": done.outcome}
            return self._show(request, "secret.html", context, 200)
        if done.unrecorded:
            log.warning("%s by %s is not in the audit: %s", op.name, actor.name, done.unrecorded)
            text = f"{done.outcome.told} But the audit could not be written; the log says why."
            return self._told(request, 200, text)
        return RedirectResponse(with_done(back, done.entry), status_code=303)

    async def _asked_again(
        self, request: Request, op: Operation, sent: Parameters, error: Refused
    ) -> Response:
        """The form with what was typed; the error alone where there is nothing to do any more."""
        first = as_first_asked(sent)
        if first is None:
            raise error
        try:
            form = await self._reader.run(lambda yard: form_of(op, yard, first))
        except (Refused, NotFound):
            raise error from None
        preview, _ = form
        if not preview.count:
            raise error
        return self._show(request, "ask.html", ask_again(op, form, first, sent, error), 400)

    async def _nothing(self, request: Request) -> Response:
        """Any other path: without a slash at its end it may be a page."""
        actor = await self._door.enter(request, "viewer")
        if isinstance(actor, Response):
            return actor
        path = request.scope["path"]
        if path.rstrip("/") != path:
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(quote(path.rstrip("/")) + query, status_code=308)
        raise NotFound("The board has no such page.")

    async def _refused(self, request: Request, error: Exception) -> Response:
        """An error that is expected, as a page."""
        status = next(status for kind, status in _STATUSES if isinstance(error, kind))
        is_ours = not isinstance(error, TokenyardError)
        if is_ours or getattr(request.state, "actor", None) is not None:
            return self._told(request, status, str(error))
        # The names of servers are not for everybody.
        return self._told(request, status, "The broker does not answer as it should.")

    async def _failed(self, request: Request, _: Exception) -> Response:
        """A mistake of ours, which the guard logs."""
        return self._told(request, 500, "The board has failed at this request; its log says why.")

    def _told(self, request: Request, status: int, message: str) -> Response:
        return self._show(request, "error.html", {"status": status, "message": message}, status)

    def _show(
        self, request: Request, template: str, context: dict[str, Any], status: int
    ) -> Response:
        html = self._templates.page(template, {**self._common(request), **context})
        return HTMLResponse(html, status_code=status)


class _Static(StaticFiles):
    """The files beside the pages, for everybody: nothing in them is secret.

    A browser asks each time whether it has the newest, so that no page meets an older script.
    """

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """A file, or that it is unchanged."""
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "no-cache"
        return answer


async def _to_root(_: Request) -> Response:
    return RedirectResponse(ROOT + "/", status_code=308)


def _just_done(yard: Yard, name: str, actor: Actor) -> AuditEntry | None:
    entry = find_entry(yard, name)
    if entry is None or entry.who != actor.name:
        return None
    return entry if unix_ms(yard.connection.time()) - entry.at_ms < _TOLD_MS else None


# Live streams: the blocks of an open page, each when it changes, as server-sent events.

EVENTS: Final = "text/event-stream"
_FULL: Final = "As many pages are open as the board keeps up to date; this one waits for a place."
#: A page for which there is no place asks again after so long.
_FULL_RETRY_MS: Final = 30_000
#: The blocks by name, or None: the stream ends.
Blocks = Callable[[], Awaitable[dict[str, str] | None]]


class LiveStreams:
    """The live streams of a board, a bounded number."""

    def __init__(self, options: BoardOptions) -> None:
        self._most = options.max_streams
        self._longest_s = options.stream_s
        self._open: set[anyio.Event] = set()  # each ends a stream
        self._has_ended = False

    def answer(self, blocks: Blocks, every_s: float) -> Response:
        """A stream of ``blocks``, asked for again after each ``every_s``."""
        if self._has_ended:
            return Response(status_code=503, headers={"retry-after": "1"})
        if len(self._open) >= self._most:
            told = f"retry: {_FULL_RETRY_MS}\n{_event('live_error', _FULL)}"
            return Response(told, media_type=EVENTS)
        ending = anyio.Event()
        self._open.add(ending)
        return _Stream(self._events(blocks, every_s, ending), lambda: self._open.discard(ending))

    def end(self) -> None:
        """End all streams and refuse new ones."""
        self._has_ended = True
        for ending in self._open:
            ending.set()

    async def _events(
        self, blocks: Blocks, every_s: float, ending: anyio.Event
    ) -> AsyncIterator[str]:
        """Each block when it changes, and a sign of life, which detects clients that are gone."""
        until = clock.monotonic() + self._longest_s
        sent: dict[str, str] = {}
        while clock.monotonic() < until and not ending.is_set():
            found = await blocks()
            if found is None:
                return
            for name, html in found.items():
                digest = hashlib.sha256(html.encode(errors="replace")).hexdigest()
                if sent.get(name) != digest:
                    sent[name] = digest
                    yield _event(name, html)
            yield ": still here\n\n"
            with anyio.move_on_after(every_s):
                await ending.wait()


class _Stream(StreamingResponse):
    """A stream that gives its place back, however it ends."""

    def __init__(self, events: AsyncIterator[str], over: Callable[[], None]) -> None:
        # Also through a proxy that would rather collect it.
        super().__init__(events, media_type=EVENTS, headers={"x-accel-buffering": "no"})
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; see the ASGI specification."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


def _event(name: str, html: str) -> str:
    lines = "\n".join(f"data: {line}" for line in html.splitlines() or [""])
    return f"event: {name}\n{lines}\n\n"
