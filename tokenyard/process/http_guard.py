"""What a browser sends for a page of another site, which every server here refuses.

Such a page can send forms and texts to any server that its visitor reaches, and can give that
server a name of its own (DNS rebinding). A page has no key, so a server that asks for keys may be
called by any name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from starlette.datastructures import Headers

from tokenyard.protocol.http_settings import LOOPBACK, TLS_PREFIX

READS: Final = ("GET", "HEAD")
_HOST: Final = re.compile(
    r"(?P<name>[a-z0-9_][a-z0-9_.-]*|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_PORTS: Final = {"http": 80, "https": 443}


class Authority(NamedTuple):
    """A host and a port, of which there may be none."""

    name: str
    port: int | None


class GuardRefusal(NamedTuple):
    """The status and the reason of a refused request."""

    status: int
    why: str


NO_HOST: Final = GuardRefusal(400, "give one Host")
FOREIGN_HOST: Final = GuardRefusal(
    403, "this server does not answer to this name: give it with the setting `hosts`"
)
FOREIGN_PAGE: Final = GuardRefusal(403, "this request comes from another page than this server's")


class SiteGuard:
    """Knows by which names a server may be called, and which other sites' pages may use it."""

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str] = ()) -> None:
        """``hosts`` beside those of loopback, None: any; and origins, of which "*" is all."""
        named = None if hosts is None else {host.removeprefix(TLS_PREFIX) for host in hosts}
        self._names = None if named is None else named.union(LOOPBACK)
        self._origins = frozenset(origins)

    def refusal(self, method: str, headers: Headers, *, is_tls: bool) -> GuardRefusal | None:
        """Why a request is refused; ``is_tls``: whether browsers reach the server by TLS only."""
        host = authority(headers.getlist("host"))
        if self._names is not None:
            if host is None:
                return NO_HOST
            if host.name not in self._names:
                return FOREIGN_HOST
        origins = headers.getlist("origin")
        if len(origins) == 1 and not self._origins.isdisjoint({origins[0], "*"}):
            return None
        is_own = not origins or (host is not None and _is_own(origins, host, is_tls=is_tls))
        if not is_own or _is_part_of_another_page(method, headers):
            return FOREIGN_PAGE
        return None


def authority(values: Sequence[str]) -> Authority | None:
    """The one host that is given; None where it is none, or not one."""
    found = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    if found is None:
        return None
    return Authority(found["name"], int(found["port"]) if found["port"] else None)


def _is_own(origins: Sequence[str], host: Authority, *, is_tls: bool) -> bool:
    """Whether a page of the server itself sends it."""
    scheme, _, rest = origins[0].lower().partition("://")
    origin = authority([rest])
    if len(origins) > 1 or scheme not in _PORTS or origin is None:
        return False
    if is_tls and scheme != "https":
        return False
    usual = _PORTS[scheme]
    same_port = (origin.port or usual) == (host.port or usual)
    return origin.name == host.name and same_port


def _is_part_of_another_page(method: str, headers: Headers) -> bool:
    """Whether a page from elsewhere shows it, fetches it or sends it; a link may lead here.

    Browsers say so themselves (Fetch Metadata), which also keeps others from using up what the
    server can do at once.
    """
    if headers.get("sec-fetch-site", "none") not in {"cross-site", "same-site"}:
        return False
    is_link = headers.get("sec-fetch-mode") == "navigate"
    return not (method in READS and is_link and headers.get("sec-fetch-dest") == "document")
