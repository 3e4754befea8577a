"""Whether a Redis server is suitable for a yard; checked once, at the start."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

import redis

from tokenyard.broker.connection import refused_write
from tokenyard.protocol.errors import BrokerUnsuitable
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts
from tokenyard.scripts.client import probe

OLDEST: Final = (7, 0)
#: Writes one key of the yard, as every script does, and deletes it.
_PROBE: Final = "redis.call('SET', KEYS[1], '1', 'PX', 1000) return redis.call('DEL', KEYS[1])"


def check_broker(connection: redis.Redis, yard: str = "main") -> list[str]:
    """Warnings for the operator of this server, one sentence each.

    Raises `BrokerUnsuitable` where a yard cannot run there, and errors of redis-py, for
    `tokenyard.broker.connection.translated`. Needs only INFO and the rights of a worker.
    """
    # First: its key leads to the node of a Cluster that has the yard.
    _probe(Yard(connection, Keys(yard)))
    try:
        info = connection.info("everything")
    except redis.exceptions.NoPermissionError:
        info = {}
    _refuse_too_old(info)
    if not info:
        return ["Redis does not let us read INFO, so its settings could not be checked."]
    return list(_warnings(info))


def write_error(yard: Yard) -> str:
    """Why a server takes no writes, and what to do; "" where it does, or this user may not ask.

    Raises errors of redis-py, for `tokenyard.broker.connection.translated`.
    """
    try:
        Scripts(yard).call(probe(yard.keys))
    except redis.ResponseError as error:
        return refused_write(error)[1]
    return ""


def server_name(info: Mapping[str, Any]) -> str:
    """Name and version of a server: ``Valkey 9.1.2``."""
    kind = "Valkey" if "valkey_version" in info else "Redis"
    return f"{kind} {info.get(f'{kind.lower()}_version', '')}"


def compatible_version(info: Mapping[str, Any]) -> tuple[int, ...]:
    """The version of Redis with the same commands."""
    return tuple(map(int, re.findall(r"\d+", str(info.get("redis_version", "")))[:2]))


def _refuse_too_old(info: Mapping[str, Any]) -> None:
    version = compatible_version(info)
    if version and version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BrokerUnsuitable(
            f"this is Redis {info['redis_version']}: Tokenyard needs {oldest} or newer"
        )


def _probe(yard: Yard) -> None:
    key = yard.keys.ledger("check", uuid.uuid4().hex)
    try:
        yard.connection.eval(_PROBE, 1, key)
    except redis.exceptions.MovedError as error:
        raise BrokerUnsuitable(
            f"this node of a Redis Cluster does not hold yard {yard.keys.yard!r}: give the URL of"
            f" {error.host}:{error.port}"
        ) from error
    except redis.exceptions.ReadOnlyError as error:
        raise BrokerUnsuitable("this is a read-only replica: give the URL of its master") from error


def _warnings(info: Mapping[str, Any]) -> Iterator[str]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield (
            f"maxmemory-policy is {policy}: when memory runs short, this Redis deletes requests"
            " that it has accepted. Set maxmemory-policy noeviction."
        )
    if not info.get("aof_enabled"):
        yield (
            "appendonly is off: when this Redis restarts, accepted requests may be lost."
            " Set appendonly yes."
        )
    elif info.get("aof_last_write_status", "ok") != "ok":
        yield "Redis could not write its append-only file: look for a full disk."
