"""The door: who asks, by a key with a role and the session that a login with it begins.

A session is a random number of 256 bits in a cookie. Redis has its digest, and the digest of the
key, which is looked up again: a revoked key ends its sessions. A program shows the key itself with
each request (``Authorization: Bearer``), and then no cookie counts.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tokenyard import clock
from tokenyard.board.forms import ROOT, read_back, read_form, read_query
from tokenyard.board.guard import is_by_tls
from tokenyard.board.page import RANK, Actor, Parameters
from tokenyard.board.reading import Busy, YardReader
from tokenyard.board.settings import BoardOptions
from tokenyard.protocol.api_keys import ID_DIGITS, Role, decode_key, key_digest
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import decoded

log = logging.getLogger("tokenyard.board")

LOGIN: Final = ROOT + "/login"
#: How long a key that was looked up is trusted, so also a revoked one.
TRUSTED_S: Final = 2.0
_MOST_KNOWN: Final = 10_000
_MOST_KEY: Final = 512
_MOST_NAME: Final = 60
_SESSION: Final = re.compile(r"[A-Za-z0-9_-]{43}")
#: Nobody guesses 256 bits. Whoever tries has to wait, so that the broker is not kept busy.
_REFUSED_AFTER_S: Final = 0.5
_MOST_REFUSED: Final = 16
_STRANGER: Final = Actor("", "viewer")
_WRONG: Final = "This key is not valid, or it opens no board: it needs a role."
#: Shows a template with a context.
Show = Callable[[Request, str, dict[str, Any], int], Response]


class BoardSession(Struct, frozen=True):
    """What Redis has of a session."""

    key: str  # digest


_session_decoder: Final = msgspec.json.Decoder(BoardSession)


class Door:
    """Finds the actor of a request, or the answer that refuses it."""

    def __init__(self, options: BoardOptions, reader: YardReader, yard: str, show: Show) -> None:
        self._options = options
        self._reader = reader
        self._show = show
        # A browser sends a cookie to all ports of a host: yards beside each other need two.
        self._cookie = f"tokenyard_board_{hashlib.sha256(yard.encode()).hexdigest()[:8]}"
        self._known: dict[tuple[str, str], tuple[float, Actor | None]] = {}
        self._refused = 0  # refusals that wait

    async def enter(self, request: Request, role: Role) -> Actor | Response:
        """The actor if its role suffices, else a redirect to the login or a refusal."""
        actor = await self._actor(request)
        request.state.actor = actor
        if actor is None:
            return await self._unknown(request)
        if actor.may(role):
            return actor
        why = f"This needs the role {role}; your key has the role {actor.role}."
        return self._told(request, 403, why)

    def routes(self) -> Sequence[Route]:
        """Login and logout."""
        return (
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
        )

    async def _actor(self, request: Request) -> Actor | None:
        if not self._options.needs_keys:
            return self._seeing(Actor("local", "admin"))
        if "authorization" in request.headers:
            key = _bearer(request)
            return await self._find("key", key_digest(key)) if key else None
        session = self._session(request)
        return await self._find("session", key_digest(session)) if session else None

    async def _find(self, kind: str, digest: str) -> Actor | None:
        """The actor of a key or a session, looked up again after a time."""
        at, actor = self._known.get((kind, digest), (0.0, None))
        if clock.monotonic() - at > TRUSTED_S or not at:
            actor = await self._reader.run(lambda yard: _look_up(yard, kind, digest))
            actor = None if actor is None else self._seeing(actor)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[kind, digest] = clock.monotonic(), actor
        return actor

    def _seeing(self, actor: Actor) -> Actor:
        rule = self._options.shows_content_to
        return replace(actor, shows_content=rule != "nobody" and RANK[actor.role] >= RANK[rule])

    async def _unknown(self, request: Request) -> Response:
        """A browser that wants to see a page is led to the login."""
        is_page = request.method in {"GET", "HEAD"} and "authorization" not in request.headers
        if is_page and "text/event-stream" not in request.headers.get("accept", ""):
            path = quote(request.scope["path"])
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"{LOGIN}?{urlencode({'back': path + query})}", 303)
        if "authorization" in request.headers:
            await self._slow_down()
        answer = self._told(request, 401, "Log in first, with a key that has a role.")
        answer.headers["www-authenticate"] = "Bearer"
        return answer

    async def _login(self, request: Request) -> Response:
        if not self._options.needs_keys:
            return RedirectResponse(ROOT + "/", 303)
        if request.method != "POST":
            given = Parameters(read_query(request), _STRANGER)
            return self._login_page(request, read_back(given), 200)
        fields = await read_form(request)
        given = Parameters(fields, _STRANGER)
        key, back = given.text("key"), read_back(given)
        actor = await self._find("key", key_digest(key)) if 0 < len(key) <= _MOST_KEY else None
        if actor is None:
            await self._slow_down()
            log.warning("refused a login: no such key, or one without a role")
            return self._login_page(request, back, 401)
        # A new number, whatever the browser has brought: nobody can prepare a session for others.
        session, before = secrets.token_urlsafe(32), self._session(request)
        packed = msgspec.json.encode(BoardSession(key_digest(key)))
        await self._reader.run(lambda yard: self._begin(yard, session, packed, before))
        self._known.pop(("session", key_digest(before)), None)
        log.info("%s (%s) has logged in", actor.name, actor.role)
        answer = RedirectResponse(back, 303)
        self._set_cookie(request, answer, session, self._options.session_s)
        return answer

    def _begin(self, yard: Yard, session: str, packed: bytes, before: str) -> None:
        if before:
            yard.connection.delete(yard.keys.board_session(key_digest(before)))
        name = yard.keys.board_session(key_digest(session))
        yard.connection.set(name, packed, ex=self._options.session_s)

    async def _logout(self, request: Request) -> Response:
        session = self._session(request)
        if session:
            digest = key_digest(session)
            await self._reader.run(
                lambda yard: yard.connection.delete(yard.keys.board_session(digest))
            )
            self._known.pop(("session", digest), None)
        answer = RedirectResponse(LOGIN, 303)
        self._set_cookie(request, answer, "", 0)
        return answer

    def _login_page(self, request: Request, back: str, status: int) -> Response:
        context = {
            "back": back,
            "error": _WRONG if status == 401 else "",
            # Such a request has no cookie (SameSite=Strict): the user may well be logged in.
            "is_from_elsewhere": request.headers.get("sec-fetch-site") == "cross-site",
        }
        return self._show(request, "login.html", context, status)

    def _told(self, request: Request, status: int, message: str) -> Response:
        return self._show(request, "error.html", {"status": status, "message": message}, status)

    async def _slow_down(self) -> None:
        """Wait before a refusal; raises `Busy` where too many wait."""
        if self._refused >= _MOST_REFUSED:
            raise Busy("too many wrong keys at once: try again in a moment")
        self._refused += 1
        try:
            await clock.pause(_REFUSED_AFTER_S)
        finally:
            self._refused -= 1

    def _cookie_of(self, request: Request) -> tuple[str, str]:
        """Name and path of the cookie.

        With TLS it begins with ``__Host-``: then no other host of the same domain, and nobody who
        can answer in its name without TLS, can plant one. That asks for the path "/", so that the
        gateway's API gets it, too, and ignores it. Without TLS the path is the board's.
        """
        if is_by_tls(request.scope):
            return f"__Host-{self._cookie}", "/"
        return self._cookie, ROOT

    def _set_cookie(self, request: Request, answer: Response, value: str, most_s: int) -> None:
        name, path = self._cookie_of(request)
        answer.set_cookie(
            name,
            value,
            max_age=most_s,
            path=path,
            secure=is_by_tls(request.scope),
            httponly=True,
            samesite="strict",
        )

    def _session(self, request: Request) -> str:
        """The session of the cookie; "" where there is none, or more than one."""
        name, _ = self._cookie_of(request)
        pairs = (
            pair.strip().partition("=")
            for header in request.headers.getlist("cookie")
            for pair in header.split(";")
        )
        found = [value for cookie, _, value in pairs if cookie == name]
        return found[0] if len(found) == 1 and _SESSION.fullmatch(found[0]) else ""


def _look_up(yard: Yard, kind: str, digest: str) -> Actor | None:
    """The actor of a key's or a session's digest, as Redis knows it now."""
    run: Any = yard.connection
    if kind == "session":
        packed = run.get(yard.keys.board_session(digest))
        session = decoded(packed or b"", _session_decoder.decode)
        if session is None:
            return None
        digest = session.key
    packed = run.hget(yard.keys.api_keys, digest)
    key = decoded(packed or b"", decode_key)
    if key is None or key.role is None:
        return None
    return Actor(f"{digest[:ID_DIGITS]} {key.name[:_MOST_NAME]}".rstrip(), key.role)


def _bearer(request: Request) -> str:
    """The key of a program; "" where it can be none."""
    scheme, _, key = request.headers["authorization"].partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and len(key) <= _MOST_KEY else ""
