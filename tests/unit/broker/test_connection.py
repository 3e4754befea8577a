"""Opening connections, and what becomes of their errors."""

from __future__ import annotations

import pytest
from redis import exceptions

from tokenyard.broker.connection import open_async_connection, open_connection, translated
from tokenyard.protocol.errors import (
    BrokerNotWritable,
    BrokerUnavailable,
    BrokerUnsuitable,
    NotPermitted,
    TokenyardError,
    WaitTimeout,
)


@pytest.mark.parametrize("open_one", [open_connection, open_async_connection])
@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "rediss://host",
        "unix:///run/redis.sock",
        "redis+cluster://a",
        "rediss+sentinel://a/yards",
    ],
)
def test_every_wait_has_a_bound(open_one: type, url: str) -> None:
    options = open_one(url, timeout_s=3.0).connection_pool.connection_kwargs
    assert options["socket_timeout"] == 3.0
    assert options["socket_connect_timeout"] == 5.0


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (exceptions.ConnectionError("refused"), BrokerUnavailable, "refused"),
        (exceptions.TimeoutError("slow"), BrokerUnavailable, "slow"),
        (ConnectionResetError("reset"), BrokerUnavailable, "reset"),
        (exceptions.BusyLoadingError("loading"), BrokerUnavailable, "is still loading its data"),
        (exceptions.MasterDownError("Link is down"), BrokerUnavailable, "has lost its master"),
        (exceptions.ClusterDownError("down"), BrokerUnavailable, "cannot"),
        (exceptions.ResponseError("UNBLOCKED force unblock"), BrokerUnavailable, "is a"),
        (exceptions.ResponseError("BUSY Redis is busy"), BrokerUnavailable, "cannot serve now"),
        (exceptions.ResponseError("BUSYGROUP exists"), BrokerUnsuitable, "BUSYGROUP"),
        (exceptions.OutOfMemoryError("not allowed"), BrokerNotWritable, r"\(OOM\)$"),
        (exceptions.ReadOnlyError("a replica"), BrokerNotWritable, r"\(READONLY\)$"),
        (exceptions.ResponseError("MISCONF Errors"), BrokerNotWritable, r"\(MISCONF\)$"),
        (exceptions.ResponseError("NOREPLICAS Not"), BrokerNotWritable, r"\(NOREPLICAS\)$"),
        (exceptions.AuthenticationError("WRONGPASS"), BrokerUnsuitable, "the user or password"),
        (exceptions.NoPermissionError("NOPERM"), NotPermitted, "lacks a permission"),
        (exceptions.ResponseError("WRONGTYPE"), BrokerUnsuitable, "WRONGTYPE"),
    ],
)
def test_errors_are_translated_and_keep_their_cause(
    error: Exception, kind: type[TokenyardError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught, translated("redis://:secret@host"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    assert "redis://host" in str(caught.value)


def test_our_own_errors_stay_as_they_are() -> None:
    with pytest.raises(WaitTimeout), translated("redis://host"):
        raise WaitTimeout("an OSError, too, as every TimeoutError is")
