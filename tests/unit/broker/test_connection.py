"""Opening connections, and what becomes of their errors."""

from __future__ import annotations

import pytest
from redis import exceptions

from tokenyard.broker.connection import (
    open_async_connection,
    open_connection,
    translated,
)
from tokenyard.protocol.errors import (
    BrokerNotWritable,
    BrokerUnavailable,
    BrokerUnsuitable,
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
    ("error", "kind"),
    [
        (exceptions.ConnectionError("refused"), BrokerUnavailable),
        (exceptions.TimeoutError("slow"), BrokerUnavailable),
        (ConnectionResetError("reset"), BrokerUnavailable),
        (exceptions.BusyLoadingError("loading"), BrokerUnavailable),
        (exceptions.OutOfMemoryError("OOM"), BrokerUnavailable),
        (exceptions.ReadOnlyError("replica"), BrokerUnavailable),
        (exceptions.ClusterDownError("The cluster is down"), BrokerUnavailable),
        (exceptions.MasterDownError("Link with MASTER is down"), BrokerUnavailable),
        (exceptions.ResponseError("UNBLOCKED force unblock"), BrokerUnavailable),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas"), BrokerUnavailable),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), BrokerUnavailable),
        (exceptions.AuthenticationError("WRONGPASS"), BrokerUnsuitable),
        (exceptions.NoPermissionError("NOPERM"), BrokerUnsuitable),
        (exceptions.ResponseError("WRONGTYPE"), BrokerUnsuitable),
    ],
)
def test_errors_are_translated_and_keep_their_cause(
    error: Exception, kind: type[TokenyardError]
) -> None:
    with pytest.raises(kind) as caught, translated("redis://:secret@host"):
        raise error
    assert caught.value.__cause__ is error
    assert "redis://host" in str(caught.value)


def test_our_own_errors_stay_as_they_are() -> None:
    with pytest.raises(WaitTimeout), translated("redis://host"):
        raise WaitTimeout("an OSError, too, as every TimeoutError is")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (exceptions.OutOfMemoryError("command not allowed"), "OOM"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), "READONLY"),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "MISCONF"),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas"), "NOREPLICAS"),
    ],
)
def test_a_refused_write_is_an_error_of_its_own(error: Exception, code: str) -> None:
    with pytest.raises(BrokerNotWritable) as caught, translated("redis://host"):
        raise error
    assert caught.value.code == code
    assert str(caught.value).endswith(f"({code})")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (exceptions.BusyLoadingError("loading"), "is still loading its data"),
        (exceptions.MasterDownError("Link with MASTER is down"), "has lost its master"),
        (exceptions.AuthenticationError("WRONGPASS"), "refuses the user or password"),
        (exceptions.NoPermissionError("NOPERM"), "lacks a permission"),
    ],
)
def test_other_refusals_are_not_refused_writes(error: Exception, said: str) -> None:
    with pytest.raises(TokenyardError, match=said) as caught, translated("redis://host"):
        raise error
    assert not isinstance(caught.value, BrokerNotWritable)
