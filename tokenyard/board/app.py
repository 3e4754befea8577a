"""The board as an ASGI application: pages, their live blocks, and actions.

A request passes the guard (`guard`: where it comes from), the door (`access`: who asks, in which
role) and only then reads or changes anything. Pages read in threads, so that a gateway that serves
the board goes on meanwhile.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import parse_qs, quote

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tokenyard.admin.audit import AuditEntry, find_entry, record
from tokenyard.board.access import Door
from tokenyard.board.action import Action, Outcome, Refused
from tokenyard.board.guard import Guard, nonce_of
from tokenyard.board.page import NotFound, Page
from tokenyard.board.pages import ACTIONS, PAGES
from tokenyard.board.reading import YardReader
from tokenyard.board.rendering import Templates
from tokenyard.board.settings import BoardOptions
from tokenyard.board.yard import MAX_PARAMETER, Actor, BadInput, Given, Yard
from tokenyard.protocol.errors import BrokerUnavailable, TokenyardError

#: Where it lies on its server.
ROOT: Final = "/board"
_EVENTS: Final = "text/event-stream"
_MOST_BODY: Final = 256 * 1024
_MOST_FIELDS: Final = 2_000
_WHY_CHARACTERS: Final = 200
#: An open page is asked to connect again after so long, which finds revoked keys and dead clients.
_LONGEST_S: Final = 300.0
Handler = Callable[[Request], Awaitable[Response]]


class Board:
    """The board of one yard. ``app`` serves all paths under `ROOT`."""

    def __init__(self, options: BoardOptions, redis_url: str, yard: str) -> None:
        self._reader = YardReader(redis_url, yard)
        self._templates = Templates()
        self._door = Door(options, self._reader)
        self._yard_name = yard
        pages = [Route(page.path, self._answering(self._page, page)) for page in PAGES]
        actions = [
            Route(f"/do/{name}", self._answering(self._action, action), methods=["GET", "POST"])
            for name, action in ACTIONS.items()
        ]
        static = Mount("/static", StaticFiles(packages=[("tokenyard.board", "static")]))
        inner = [*self._door.routes(self._answering), *actions, static, *pages]
        self.app: ASGIApp = Guard(Starlette(routes=[Mount(ROOT, routes=inner)]), options)

    def close(self) -> None:
        """Close its connections; idempotent."""
        self._reader.close()

    def _answering(self, handler: Callable[..., Awaitable[Response]], *args: Any) -> Handler:
        """The handler, with errors turned into pages."""

        @functools.wraps(handler)
        async def answering(request: Request) -> Response:
            try:
                return await handler(request, *args)
            except (BadInput, Refused) as error:
                return self._told(request, 400, str(error))
            except NotFound as error:
                return self._told(request, 404, str(error))
            except BrokerUnavailable as error:
                return self._told(request, 503, str(error))
            except TokenyardError as error:
                return self._told(request, 502, str(error))

        return answering

    async def _page(self, request: Request, page: Page) -> Response:
        actor = await self._door.enter(request, page.role)
        if isinstance(actor, Response):
            return actor
        given = Given(_query(request), actor)
        if _EVENTS in request.headers.get("accept", ""):
            return StreamingResponse(self._live(request, page, given), media_type=_EVENTS)
        context = await self._context(request, page, given)
        context["done"] = await self._done(given)
        return HTMLResponse(self._templates.page(page.template, context))

    async def _context(self, request: Request, page: Page, given: Given) -> dict[str, Any]:
        key = (page.path, str(request.url), given.actor)
        found = await self._reader.shared(key, lambda yard: page.view(yard, given))
        return {**self._common(request, given.actor), "page": page, **found}

    def _common(self, request: Request, actor: Actor | None) -> dict[str, Any]:
        """What every template can use."""
        return {
            "root": ROOT,
            "yard_name": self._yard_name,
            "pages": PAGES,
            "actor": actor,
            "nonce": nonce_of(request.scope),
            "done": None,
            "needs_keys": self._door.needs_keys,
        }

    async def _done(self, given: Given) -> AuditEntry | None:
        """The action that led here, to say what has happened."""
        entry = given.text("done")
        if not entry:
            return None
        return await self._reader.run(lambda yard: find_entry(yard.connection, yard.keys, entry))

    async def _live(self, request: Request, page: Page, given: Given) -> AsyncIterator[str]:
        """The live blocks, each when it changes, as server-sent events."""
        sent: dict[str, str] = {}
        with anyio.move_on_after(_LONGEST_S):
            while not await request.is_disconnected():
                try:
                    context = await self._context(request, page, given)
                    blocks = self._templates.live_blocks(page.template, context)
                    blocks["live_error"] = ""
                except TokenyardError as error:
                    blocks = {"live_error": str(error)}
                for name, html in blocks.items():
                    digest = hashlib.sha256(html.encode()).hexdigest()
                    if sent.get(name) != digest:
                        sent[name] = digest
                        yield _event(name, html)
                yield ": still here\n\n"
                await anyio.sleep(page.every_s)

    async def _action(self, request: Request, action: Action) -> Response:
        """GET asks whether to do it, POST does it."""
        actor = await self._door.enter(request, action.role)
        if isinstance(actor, Response):
            return actor
        is_asking = request.method != "POST"
        given = Given(_query(request) if is_asking else await _form(request), actor)
        back = _back(given)
        common = {**self._common(request, actor), "action": action, "back": back}
        if is_asking:
            preview = await self._reader.run(lambda yard: action.preview(yard, given))
            hidden = [
                (name, value)
                for name, values in given.values.items()
                for value in values
                if name not in {one.name for one in preview.inputs} | {"why", "done"}
            ]
            context = {**common, "preview": preview, "hidden": hidden}
            return HTMLResponse(self._templates.page("ask.html", context))
        outcome, entry = await self._reader.run(lambda yard: _carry_out(yard, action, given))
        if outcome.secret:
            return HTMLResponse(self._templates.page("secret.html", {**common, "outcome": outcome}))
        mark = "&" if "?" in back else "?"
        return RedirectResponse(f"{back}{mark}done={quote(entry)}", status_code=303)

    def _told(self, request: Request, status: int, message: str) -> Response:
        context = {**self._common(request, None), "status": status, "message": message}
        return HTMLResponse(self._templates.page("error.html", context), status_code=status)


def _carry_out(yard: Yard, action: Action, given: Given) -> tuple[Outcome, str]:
    """Do it and record it, also when it is refused or breaks in the middle."""
    why = given.text("why")[:_WHY_CHARACTERS]
    entry = AuditEntry(
        who=given.actor.name, role=given.actor.role, action=action.name, why=why, target=""
    )
    try:
        outcome = action.run(yard, given)
    except Refused as error:
        record(yard.connection, yard.keys, replace(entry, error=str(error)))
        raise
    done = replace(entry, target=outcome.target, text=outcome.text, details=dict(outcome.details))
    return outcome, record(yard.connection, yard.keys, done)


def _event(name: str, html: str) -> str:
    lines = "\n".join(f"data: {line}" for line in html.splitlines() or [""])
    return f"event: {name}\n{lines}\n\n"


def _query(request: Request) -> Mapping[str, list[str]]:
    """Parameters of the query and the path; those of the path count."""
    values = _bounded(request.url.query)
    return values | {name: [str(value)] for name, value in request.path_params.items()}


async def _form(request: Request) -> Mapping[str, list[str]]:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY:
            raise BadInput(f"the form has more than {_MOST_BODY} bytes: select fewer at once")
    return _bounded(body.decode(errors="replace"))


def _bounded(text: str) -> dict[str, list[str]]:
    try:
        found = parse_qs(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise BadInput(f"more than {_MOST_FIELDS} fields: select fewer at once") from error
    if any(len(value) > MAX_PARAMETER for values in found.values() for value in values):
        raise BadInput(f"a field has more than {MAX_PARAMETER} characters")
    return found


def _back(given: Given) -> str:
    """The page to return to: only one of the board."""
    back = given.text("back", ROOT + "/")
    is_ours = back.startswith(ROOT + "/") and "//" not in back and "\\" not in back
    return back if is_ours and back.isprintable() else ROOT + "/"
