"""Where a request comes from, and what browsers may do with an answer.

Host and Origin are checked for every request that may change something, whatever its method, so
that no page from elsewhere can act here, not even under another name for this host.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenyard.board.settings import LOOPBACK, BoardOptions

_NONCE: Final = "tokenyard.board.nonce"


def nonce_of(scope: Any) -> str:
    """The nonce of this answer's scripts and styles."""
    return str(scope[_NONCE])


class Guard:
    """Refuses what comes from elsewhere, and adds the headers of safety."""

    def __init__(self, app: ASGIApp, options: BoardOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; see the ASGI specification."""
        if scope["type"] != "http":
            return
        scope[_NONCE] = nonce = secrets.token_urlsafe(16)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(MutableHeaders(scope=message), nonce)
            await send(message)

        if why := self._why_refused(scope["method"], Headers(scope=scope)):
            await PlainTextResponse(why, status_code=403)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _why_refused(self, method: str, headers: Headers) -> str:
        host = headers.get("host", "")
        if not self._is_known(host):
            return "The board is not known as this host: give it to --board-hosts.\n"
        if method in {"GET", "HEAD"}:
            return ""
        origin = headers.get("origin", "")
        if origin.partition("://")[2] != host:
            return "This request comes from another page than the board's.\n"
        return ""

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name in self._options.hosts or name in LOOPBACK:
            return True
        return self._options.needs_keys and not self._options.hosts and bool(host)


def _add_headers(headers: MutableHeaders, nonce: str) -> None:
    headers["content-security-policy"] = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}';"
        " img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none';"
        " frame-ancestors 'none'"
    )
    headers["x-content-type-options"] = "nosniff"
    headers["referrer-policy"] = "same-origin"
    headers["cross-origin-opener-policy"] = "same-origin"
    headers["cross-origin-resource-policy"] = "same-origin"
    headers.setdefault("cache-control", "no-store")
