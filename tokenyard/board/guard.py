"""Where a request comes from, and what browsers may do with an answer.

Beside what every server refuses of other sites (`tokenyard.process.http_guard`), what is not only
read must come from a page of the board itself, whatever its method. A program that shows a key with
each request needs no page: no browser adds such a header for a page from elsewhere, since no answer
of the board allows it (CORS).
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenyard.board.settings import BoardOptions
from tokenyard.process import http_guard
from tokenyard.protocol.texts import printable

log = logging.getLogger("tokenyard.board")

_NONCE: Final = "tokenyard.board.nonce"
_IS_BY_TLS: Final = "tokenyard.board.is_by_tls"
_METHODS: Final = (*http_guard.READS, "POST")
#: Headers that a proxy adds. Without keys nobody may come through one: the board would take all
#: the world for this machine.
_OF_PROXIES: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_PROXY: Final = "the board is reached by a proxy: it needs keys (set keys required)"


def nonce_of(scope: Any) -> str:
    """The nonce of this answer's scripts and styles."""
    return str(scope[_NONCE])


def is_by_tls(scope: Any) -> bool:
    """Whether the browser has come by TLS, as far as is known."""
    return bool(scope[_IS_BY_TLS])


class Guard:
    """Refuses what comes from elsewhere, and adds the headers of safety."""

    def __init__(self, app: ASGIApp, options: BoardOptions) -> None:
        self._app = app
        self._options = options
        takes_any_host = options.needs_keys and not options.hosts
        self._sites = http_guard.SiteGuard(None if takes_any_host else options.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; see the ASGI specification."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        scope[_NONCE] = nonce = secrets.token_urlsafe(16)
        has_begun = False

        async def guarded(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                _add_headers(MutableHeaders(scope=message), nonce)
            await send(message)

        if refusal := self._refusal(scope):
            answer = PlainTextResponse(f"{refusal.why}\n", status_code=refusal.status)
            if refusal.status == 405:
                answer.headers["allow"] = ", ".join(_METHODS)
            await answer(scope, receive, guarded)
            return
        try:
            await self._app(scope, receive, guarded)
        except Exception:
            log.exception("%s %s failed", scope["method"], printable(scope["path"][:200]))
            if not has_begun:
                text = "The board has failed at this request; its log says why.\n"
                await PlainTextResponse(text, status_code=500)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> http_guard.GuardRefusal | None:
        """Why a request is refused; it also sets whether it has come by TLS."""
        headers, method = Headers(scope=scope), scope["method"]
        host = http_guard.authority(headers.getlist("host"))
        if host is None:
            return http_guard.NO_HOST
        is_tls = scope["scheme"] == "https" or self._options.is_by_tls(host.name)
        scope[_IS_BY_TLS] = is_tls
        if refusal := self._sites.refusal(method, headers, is_tls=is_tls):
            return refusal
        if not self._options.needs_keys and any(name in headers for name in _OF_PROXIES):
            return http_guard.GuardRefusal(403, _PROXY)
        is_program = self._options.needs_keys and "authorization" in headers
        if method not in http_guard.READS and "origin" not in headers and not is_program:
            return http_guard.FOREIGN_PAGE
        if method not in _METHODS:
            return http_guard.GuardRefusal(405, "the board knows GET, HEAD and POST")
        return None


def _add_headers(headers: MutableHeaders, nonce: str) -> None:
    headers["content-security-policy"] = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}';"
        " img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none';"
        " frame-ancestors 'none'"
    )
    headers["x-content-type-options"] = "nosniff"
    headers["x-frame-options"] = "DENY"
    headers["referrer-policy"] = "same-origin"
    headers["cross-origin-opener-policy"] = "same-origin"
    headers["cross-origin-resource-policy"] = "same-origin"
    headers.setdefault("cache-control", "no-store")
