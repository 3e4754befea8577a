"""URLs of brokers: how they are read and shown.

``redis://``, ``rediss://`` (TLS) and ``unix://`` are redis-py's, with its options behind the
``?``. With several hosts there are ``redis+sentinel://a:26379,b:26379/service``, to which a
database may be added, and ``redis+cluster://a:6379,b:6379``; both also with ``rediss``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.connection import parse_url

from tokenyard.broker.discovery import Address, AddressBook, ClusterNodes, Sentinels
from tokenyard.broker.tls import TlsConnection
from tokenyard.protocol.errors import SettingsError

SCHEMES: Final = ("redis", "rediss", "unix")
#: Suffixes of the schemes ``redis`` and ``rediss``, with their default ports.
_PORTS: Final = {"sentinel": 26379, "cluster": 6379}
#: Options of a URL for the Sentinels, which have their own users.
_OF_SENTINELS: Final = {"sentinel_username": "username", "sentinel_password": "password"}
#: Options of a URL for the pool, not for one connection.
_OF_THE_POOL: Final = frozenset({"max_connections", "timeout"})
#: Options of redis-py that change the form of all answers: Tokenyard reads only its own.
_OF_ANSWERS: Final = frozenset({"protocol", "decode_responses", "encoding", "encoding_errors"})
_PASSWORD_IN_QUERY: Final = re.compile(r"(^|&)(sentinel_)?password=[^&]*", re.IGNORECASE)


def public_url(url: str) -> str:
    """The URL without user name and password, for logs and messages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.rpartition("@")[2]
    query = _PASSWORD_IN_QUERY.sub("", parts.query).lstrip("&")
    netloc = parts.netloc.rpartition("@")[2]
    shown = urlunsplit((parts.scheme, netloc, parts.path, query, ""))
    # urlunsplit omits an empty host where the path does not need it.
    return shown if "://" in shown else shown.replace(":", "://", 1)


def named_url(url: str) -> str:
    """`public_url` with the user name, for messages about permissions."""
    shown = public_url(url)
    try:
        user = urlsplit(url).username
    except ValueError:
        user = None
    return shown.replace("://", f"://{user}@", 1) if user else shown


def user_of(url: str) -> str:
    """The user name in a URL; "" where it has none."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return unquote(parts.username or "") or dict(parse_qsl(parts.query)).get("username", "")


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that redis-py accepts, and an address book where the server may move.

    The caller chooses the class of connections by ``book`` and ``has_tls``; the URL has no TLS.
    """

    url: str
    book: AddressBook | None = None
    has_tls: bool = False


def read_url(url: str, timeout_s: float) -> Target:
    """Read a URL; raises `SettingsError` for a bad one.

    ``timeout_s`` bounds each lookup of a server.
    """
    try:
        return _target(urlsplit(url), url, timeout_s)
    except ValueError as error:
        raise SettingsError([f"redis URL {public_url(url)!r}: {error}"]) from error


def _target(parts: SplitResult, url: str, timeout_s: float) -> Target:
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name in _OF_ANSWERS:
            raise ValueError(f"leave out {name}: Tokenyard chooses the form of answers itself")
    base, _, kind = parts.scheme.partition("+")
    if not kind and base in SCHEMES:
        has_tls = base == "rediss"
        return Target(url.replace(parts.scheme, "redis", 1) if has_tls else url, has_tls=has_tls)
    if kind not in _PORTS or base not in {"redis", "rediss"}:
        raise ValueError(
            "use redis://, rediss:// or unix://, or for several hosts redis+sentinel:// or"
            " redis+cluster://"
        )
    addresses = _addresses(parts, _PORTS[kind])
    service, _, database = parts.path.strip("/").partition("/")
    if kind == "cluster":
        if service not in {"", "0"}:
            raise ValueError("a cluster has no databases: leave out what follows the hosts")
        book: AddressBook = _cluster(_plain(parts, base, addresses[0]), tuple(addresses), timeout_s)
        return Target(_plain(parts, "redis", addresses[0]), book, base == "rediss")
    if not service:
        raise ValueError("name the service that the Sentinels watch: redis+sentinel://.../service")
    options = _asking(_plain(parts, base, addresses[0]), timeout_s) | _sentinel_user(parts)
    book = Sentinels(service, addresses, options)
    return Target(_plain(parts, "redis", addresses[0], database), book, base == "rediss")


def _addresses(parts: SplitResult, default_port: int) -> list[Address]:
    found = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
    addresses = [(one.hostname or "", one.port or default_port) for one in found]
    if not all(host for host, _ in addresses):
        raise ValueError("give one or more hosts, with commas between them")
    return addresses


def _plain(parts: SplitResult, base: str, address: Address, database: str = "") -> str:
    """The URL of one host, from which redis-py reads the options."""
    who, at, _ = parts.netloc.rpartition("@")
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in _OF_SENTINELS]
    path = f"/{database}" if database else ""
    return urlunsplit((base, f"{who}{at}{host}:{address[1]}", path, urlencode(query), ""))


def _sentinel_user(parts: SplitResult) -> dict[str, str | None]:
    given = dict(parse_qsl(parts.query))
    return {option: given.get(name) for name, option in _OF_SENTINELS.items()}


def _asking(plain: str, timeout_s: float) -> dict[str, Any]:
    """Options of a connection for lookups."""
    bounds = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options: dict[str, Any] = parse_url(plain)  # type: ignore[no-untyped-call]
    mine = {name: value for name, value in options.items() if name not in _OF_THE_POOL}
    if plain.startswith("rediss:"):
        mine["connection_class"] = TlsConnection
    return {**mine, **bounds}


@functools.cache
def _cluster(plain: str, addresses: tuple[Address, ...], timeout_s: float) -> ClusterNodes:
    """Shared by all connections of a process, so that only the first one is redirected."""
    return ClusterNodes(addresses, _asking(plain, timeout_s))
