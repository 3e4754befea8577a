"""URLs of brokers: how they are read and shown.

``redis://``, ``rediss://`` (TLS) and ``unix://`` are redis-py's, with its options behind the
``?``. With several hosts there are ``redis+sentinel://a:26379,b:26379/service``, to which a
database may be added, and ``redis+cluster://a:6379,b:6379``; both also with ``rediss``.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlunsplit

from redis.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)

from tokenyard.broker.discovery import Address, AddressBook, ClusterNodes, Sentinels
from tokenyard.broker.tls import TlsConnection
from tokenyard.protocol.errors import SettingsError

SCHEMES: Final = ("redis", "rediss", "unix")
#: The variables that say who we are, for a URL that does not: user, password, and its file.
CREDENTIALS: Final = (
    "TOKENYARD_REDIS_USERNAME",
    "TOKENYARD_REDIS_PASSWORD",
    "TOKENYARD_REDIS_PASSWORD_FILE",
)
#: The URL of the Redis that has the batch jobs of RQ, where that is not the yard's.
BATCH_URL_VARIABLE: Final = "TOKENYARD_BATCH_REDIS_URL"
#: Suffixes of the schemes ``redis`` and ``rediss``, with their default ports.
_PORTS: Final = {"sentinel": 26379, "cluster": 6379}
#: Options of a URL for the Sentinels, which have their own users.
_OF_SENTINELS: Final = {"sentinel_username": "username", "sentinel_password": "password"}
#: Options of a URL for the pool, not for one connection.
_OF_THE_POOL: Final = frozenset({"max_connections", "timeout"})
#: Options of redis-py that change the form of all answers: Tokenyard reads only its own.
_OF_ANSWERS: Final = frozenset({"protocol", "decode_responses", "encoding", "encoding_errors"})
_SECRET: Final = frozenset({"password", "sentinel_password"})
_FORM: Final = re.compile(
    r"(?P<scheme>[a-z+]+)://(?:(?P<who>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(?P<path>/[^?#@]*)?"
    r"(?:\?(?P<query>[^#]*))?",
    re.IGNORECASE,
)
_HOST: Final = re.compile(r"(\[[0-9a-f:.%]+\]|[^\[\]:]*)(?::([0-9]{1,5}))?", re.IGNORECASE)
_ENCODE: Final = (
    "in a user name or password write / ? # @ as %2F %3F %23 %40, or give them as"
    f" {CREDENTIALS[0]} and {CREDENTIALS[1]}"
)


class BrokerUrl(NamedTuple):
    """The parts of a URL, as they stand there."""

    scheme: str
    who: str  # <user>:<password>
    hosts: str
    path: str
    query: str

    @property
    def user(self) -> str:
        """The user name; "" where it has none."""
        return unquote(self.who.partition(":")[0]) or self.options.get("username", "")

    @property
    def has_password(self) -> bool:
        """Whether there is a password."""
        return bool(self.who.partition(":")[2] or self.options.get("password"))

    @property
    def options(self) -> dict[str, str]:
        """What stands behind the ``?``."""
        return dict(parse_qsl(self.query, keep_blank_values=True))

    @property
    def addresses(self) -> list[tuple[str, int | None]]:
        """Hosts and ports; raises `ValueError`."""
        found = [_HOST.fullmatch(host) for host in self.hosts.split(",")]
        if not all(found):
            raise ValueError(f"a port is a number; {_ENCODE}")
        return [(one[1].strip("[]"), int(one[2]) if one[2] else None) for one in found if one]


def split_url(url: str) -> BrokerUrl:
    """The parts of a URL; raises `ValueError`.

    `urlsplit` knows no URL with several hosts.
    """
    found = _FORM.fullmatch(url)
    if found is None:
        raise ValueError(_ENCODE if "://" in url else "it begins with redis://")
    return BrokerUrl(*(part or "" for part in found.groups()))


def public_url(url: str) -> str:
    """The URL without user name and password, for logs and messages; also a URL that is wrong."""
    place, _, query = url.partition("?")
    told = [
        one for one in query.split("&") if unquote(one.partition("=")[0]).lower() not in _SECRET
    ]
    scheme, mark, rest = "?".join(filter(None, (place, "&".join(told)))).rpartition("://")
    return f"{scheme.partition(':')[0]}{mark}{rest.rpartition('@')[2]}"


def named_url(url: str) -> str:
    """`public_url` with the user name, for messages about permissions."""
    try:
        user = split_url(url).who.partition(":")[0]
    except ValueError:
        user = ""
    shown = public_url(url)
    return shown.replace("://", f"://{user}@", 1) if user else shown


def with_credentials(url: str) -> str:
    """The URL with the user name and password of the environment, where it has none itself.

    Raises `SettingsError` where the password's file cannot be read.
    """
    try:
        parts = split_url(url)
    except ValueError:
        return url  # whoever connects says what is wrong with it
    user, password, file = map(os.environ.get, CREDENTIALS)
    if password is None and file:
        try:
            password = Path(file).read_text("utf-8").rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise SettingsError([f"{CREDENTIALS[2]}: {error}"]) from error
    if parts.has_password or not (user or password):
        return url
    user = parts.user or user or ""
    who = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    query = urlencode([one for one in parse_qsl(parts.query) if one[0] != "username"])
    return f"{parts.scheme}://{who}@{parts.hosts}{parts.path}{query and '?'}{query}"


def batch_url(url: str) -> str:
    """The URL of the Redis that has the batch jobs of a yard at ``url``.

    Raises `SettingsError` for a Redis Cluster: RQ's keys would be on several of its nodes.
    """
    own = os.environ.get(BATCH_URL_VARIABLE)
    found = with_credentials(own) if own else url
    if found.partition("://")[0].lower().endswith("+cluster"):
        raise SettingsError(
            [f"batch jobs need a Redis that is no Cluster: set {BATCH_URL_VARIABLE} to its URL"]
        )
    return found


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
        return _target(split_url(url), url, timeout_s)
    except ValueError as error:
        raise SettingsError([f"redis URL {public_url(url)!r}: {error}"]) from error


def _target(parts: BrokerUrl, url: str, timeout_s: float) -> Target:
    _check_options(parts)
    base, _, kind = parts.scheme.lower().partition("+")
    if not kind and base in SCHEMES:
        return _one_host(parts, url, base)
    if kind not in _PORTS or base not in {"redis", "rediss"}:
        raise ValueError(
            "use redis://, rediss:// or unix://, or for several hosts redis+sentinel:// or"
            " redis+cluster://"
        )
    addresses = [(host, port or _PORTS[kind]) for host, port in parts.addresses]
    if not all(host for host, _ in addresses):
        raise ValueError("give one or more hosts, with commas between them")
    service, _, database = parts.path.strip("/").partition("/")
    if kind == "cluster":
        if service not in {"", "0"}:
            raise ValueError("a cluster has no databases: leave out what follows the hosts")
        book: AddressBook = _cluster(_plain(parts, base, addresses[0]), tuple(addresses), timeout_s)
        return Target(_plain(parts, "redis", addresses[0]), book, base == "rediss")
    if not service:
        raise ValueError("name the service that the Sentinels watch: redis+sentinel://.../service")
    if database and not database.isdecimal():
        raise ValueError("what follows the service is the number of a database")
    options = _asking(_plain(parts, base, addresses[0]), timeout_s)
    options |= {option: parts.options.get(name) for name, option in _OF_SENTINELS.items()}
    book = Sentinels(service, addresses, options)
    return Target(_plain(parts, "redis", addresses[0], database), book, base == "rediss")


def _check_options(parts: BrokerUrl) -> None:
    for name in parts.options:
        if name in _OF_ANSWERS:
            raise ValueError(f"leave out {name}: Tokenyard chooses the form of answers itself")
        if name not in _known_options():
            told = name if name.isidentifier() else "what follows the ?"
            raise ValueError(f"{told} is no option of a connection (redis-py's documentation)")


def _one_host(parts: BrokerUrl, url: str, base: str) -> Target:
    if base != "unix":
        if not re.fullmatch("/?[0-9]*", parts.path):
            raise ValueError("what follows the host is the number of a database")
        if len(parts.addresses) > 1:
            raise ValueError("for several hosts use redis+sentinel:// or redis+cluster://")
    has_tls = base == "rediss"
    return Target(url.replace(parts.scheme, "redis", 1) if has_tls else url, has_tls=has_tls)


@functools.cache
def _known_options() -> frozenset[str]:
    """The options of redis-py's connections, and our own."""
    kinds = (AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection)
    of_connections = (inspect.signature(kind.__init__).parameters for kind in kinds)
    return frozenset().union(*of_connections, _OF_THE_POOL, _OF_SENTINELS)


def _plain(parts: BrokerUrl, base: str, address: Address, database: str = "") -> str:
    """The URL of one host, from which redis-py reads the options."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    place = f"{parts.who}{parts.who and '@'}{host}:{address[1]}"
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in _OF_SENTINELS]
    path = f"/{database}" if database else ""
    return urlunsplit((base, place, path, urlencode(query), ""))


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
