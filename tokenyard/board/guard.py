"""Where a request comes from, and what browsers may do with an answer.

Two attacks come through the browser of somebody who may use the board. A page from elsewhere sends
a form, or lets this host have another name (DNS rebinding). Against both, the host of each request
must be known, and what is not only read must come from a page of the board itself, whatever its
method. A program that shows a key with each request needs no page: no browser adds such a header
for a page from elsewhere, since no answer of the board allows it (CORS).
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any, Final, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenyard.board.settings import BoardOptions
from tokenyard.protocol.texts import printable

log = logging.getLogger("tokenyard.board")

_NONCE: Final = "tokenyard.board.nonce"
_IS_BY_TLS: Final = "tokenyard.board.is_by_tls"
_READS: Final = ("GET", "HEAD")
_METHODS: Final = (*_READS, "POST")
_HOST: Final = re.compile(
    r"(?P<name>[a-z0-9_][a-z0-9_.-]*|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_PORTS: Final = {"http": 80, "https": 443}
#: Headers that a proxy adds. Without keys nobody may come through one: the board would take all
#: the world for this machine.
_OF_PROXIES: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_FOREIGN_HOST: Final = "The board does not answer to this name: give it as a host of the board.\n"
_FOREIGN_PAGE: Final = "This request comes from another page than the board's.\n"
_PROXY: Final = "The board is reached by a proxy: it needs keys (set keys required).\n"


class _Authority(NamedTuple):
    """A host and a port, of which there may be none."""

    name: str
    port: int | None


class _Refusal(NamedTuple):
    status: int
    why: str


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
            answer = PlainTextResponse(refusal.why, status_code=refusal.status)
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

    def _refusal(self, scope: Scope) -> _Refusal | None:
        """Why a request is refused; it also sets whether it has come by TLS."""
        headers, method = Headers(scope=scope), scope["method"]
        host = _authority(headers.getlist("host"))
        if host is None:
            return _Refusal(400, "Give one Host.\n")
        if not self._options.is_known(host.name):
            return _Refusal(403, _FOREIGN_HOST)
        if not self._options.needs_keys and any(name in headers for name in _OF_PROXIES):
            return _Refusal(403, _PROXY)
        scope[_IS_BY_TLS] = scope["scheme"] == "https" or self._options.is_by_tls(host.name)
        if _is_part_of_another_page(method, headers):
            return _Refusal(403, _FOREIGN_PAGE)
        if method not in _READS and not self._is_from_here(headers, host, scope[_IS_BY_TLS]):
            return _Refusal(403, _FOREIGN_PAGE)
        if method not in _METHODS:
            return _Refusal(405, "The board knows GET, HEAD and POST.\n")
        return None

    def _is_from_here(self, headers: Headers, host: _Authority, is_tls: bool) -> bool:
        """Whether it comes from a page of the board, or from a program with a key."""
        origins = headers.getlist("origin")
        if not origins:
            return self._options.needs_keys and "authorization" in headers
        scheme, _, rest = origins[0].lower().partition("://")
        origin = _authority([rest])
        if len(origins) > 1 or scheme not in _PORTS or origin is None:
            return False
        if is_tls and scheme != "https":
            return False
        usual = _PORTS[scheme]
        same_port = (origin.port or usual) == (host.port or usual)
        return origin.name == host.name and same_port


def _authority(values: list[str]) -> _Authority | None:
    """The one host that is given; None where it is none, or not one."""
    found = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    if found is None:
        return None
    return _Authority(found["name"], int(found["port"]) if found["port"] else None)


def _is_part_of_another_page(method: str, headers: Headers) -> bool:
    """Whether a page from elsewhere shows it, fetches it or sends it; a link may lead here.

    Browsers say so themselves (Fetch Metadata), which also keeps others from using up what the
    board can do at once.
    """
    if headers.get("sec-fetch-site", "none") not in {"cross-site", "same-site"}:
        return False
    is_link = headers.get("sec-fetch-mode") == "navigate"
    return not (method in _READS and is_link and headers.get("sec-fetch-dest") == "document")


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
