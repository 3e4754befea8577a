"""Opening connections, and what becomes of their errors."""

from __future__ import annotations

import pytest
from redis import exceptions

from tokenyard.broker.connection import (
    open_async_connection,
    open_connection,
    public_url,
    translated,
)
from tokenyard.protocol.errors import (
    BrokerNotWritable,
    BrokerUnavailable,
    BrokerUnsuitable,
    SettingsError,
    TokenyardError,
    WaitTimeout,
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost", "redis://localhost"),
        ("redis://:secret@host:6379/0", "redis://host:6379/0"),
        ("rediss://user:secret@host/1?ssl_cert_reqs=none", "rediss://host/1?ssl_cert_reqs=none"),
        ("unix:///run/redis.sock?db=2&password=secret", "unix:///run/redis.sock?db=2"),
        ("unix://user@/run/redis.sock?password=secret&db=2", "unix:///run/redis.sock?db=2"),
    ],
)
def test_messages_show_no_secrets(url: str, shown: str) -> None:
    assert public_url(url) == shown


@pytest.mark.parametrize("open_one", [open_connection, open_async_connection])
def test_every_wait_has_a_bound(open_one: type) -> None:
    for url in ("redis://host", "rediss://host", "unix:///run/redis.sock"):
        options = open_one(url, timeout_s=3.0).connection_pool.connection_kwargs
        assert options["socket_timeout"] == 3.0
        assert options["socket_connect_timeout"] == 5.0


@pytest.mark.parametrize("open_one", [open_connection, open_async_connection])
@pytest.mark.parametrize("url", ["http://u:secret@host", "host:6379", "redis://host:port"])
def test_a_bad_url_is_refused(open_one: type, url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_one(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.ConnectionError("refused"), BrokerUnavailable),
        (exceptions.TimeoutError("slow"), BrokerUnavailable),
        (ConnectionResetError("reset"), BrokerUnavailable),
        (exceptions.BusyLoadingError("loading"), BrokerUnavailable),
        (exceptions.OutOfMemoryError("OOM"), BrokerUnavailable),
        (exceptions.ReadOnlyError("replica"), BrokerUnavailable),
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
def test_what_else_keeps_one_out_is_no_refused_write(error: Exception, said: str) -> None:
    with pytest.raises(TokenyardError, match=said) as caught, translated("redis://host"):
        raise error
    assert not isinstance(caught.value, BrokerNotWritable)
