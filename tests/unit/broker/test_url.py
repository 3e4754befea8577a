"""URLs of brokers with one host or several."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenyard.broker.connection import open_async_connection, open_connection
from tokenyard.broker.discovery import ClusterNodes, Sentinels
from tokenyard.broker.url import public_url, read_url, with_credentials
from tokenyard.protocol.errors import SettingsError

SENTINELS = "redis+sentinel://ann:s%40e@a:1,b/yards/2?ssl_ca_certs=ca&sentinel_username=s"


def test_a_url_of_one_host_is_left_alone() -> None:
    for url in ("redis://host", "redis://u:p@host:1/2?ssl_ca_certs=ca", "unix:///run/redis.sock"):
        target = read_url(url, 1.0)
        assert (target.url, target.book, target.has_tls) == (url, None, False)


def test_a_url_with_tls_says_so_beside_the_url() -> None:
    target = read_url("rediss://u:p@host:1/2?ssl_ca_certs=ca", 1.0)

    assert (target.url, target.book) == ("redis://u:p@host:1/2?ssl_ca_certs=ca", None)
    assert target.has_tls


def test_sentinels() -> None:
    # Given a URL of two Sentinels that have a user of their own
    target = read_url(SENTINELS + "&sentinel_password=t", 1.5)

    # I expect that the service is looked for at both,
    assert isinstance(target.book, Sentinels)
    assert target.book.service == "yards"
    assert target.book.sentinels == [("a", 1), ("b", 26379)]
    # with the Sentinels' user and options, never without a bound,
    asking = dict(target.book.options)
    assert (asking["username"], asking["password"]) == ("s", "t")
    assert "db" not in asking
    assert (asking["socket_timeout"], asking["socket_connect_timeout"]) == (1.5, 1.5)
    assert asking["ssl_ca_certs"] == "ca"
    # and that the service itself gets its own.
    assert target.url == "redis://ann:s%40e@a:1/2?ssl_ca_certs=ca"


def test_a_sentinel_is_not_given_the_password_of_the_service() -> None:
    target = read_url("redis+sentinel://ann:secret@a/yards", 1.0)
    assert isinstance(target.book, Sentinels)
    assert target.book.options["username"] is None
    assert target.book.options["password"] is None


def test_cluster() -> None:
    # Given a URL of cluster nodes, over TLS
    url = "rediss+cluster://ann:p@a:7000,[::1]:7001,b"
    target = read_url(url, 1.0)

    # I expect all of them to be asked,
    assert isinstance(target.book, ClusterNodes)
    assert target.url == "redis://ann:p@a:7000"
    assert target.has_tls
    # and that a process asks once for all its connections.
    assert read_url(url, 1.0).book is target.book


@pytest.mark.parametrize("open_one", [open_connection, open_async_connection])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://u:secret@host", "redis"),
        ("host:6379", "redis"),
        ("redis://host:port", "redis"),
        ("redis+sentinel://u:secret@a,b", "name the service"),
        ("redis+sentinel://u:secret@/yards", "one or more hosts"),
        ("redis+cluster://u:secret@a,,b", "one or more hosts"),
        ("redis+cluster://u:secret@a/3", "no databases"),
        ("redis+cluster://u:secret@a:port", "port"),
        ("unix+cluster://u:secret@a", "use redis://"),
        ("redis+magic://u:secret@a", "use redis://"),
        ("redis://u:secret@a?protocol=3", "leave out protocol"),
        ("redis+sentinel://u:secret@a/yards?decode_responses=", "leave out decode_responses"),
        ("redis://u:se/secret@host/0", "write / .* as %2F"),
        ("redis://:se?secret@host/0", "what follows the \\? is no option"),
        ("redis://:se/:secret@host", "write / .* as %2F"),
        ("redis://host:6379x", "port is a number"),
        ("redis://:12?secret@host/0", "what follows the \\? is no option"),
        ("redis://u:se#secret@host", "write / .* as %2F"),
        ("redis://u:secret@host/0?foo=bar", "foo is no option of a connection"),
        ("redis://host/zero", "number of a database"),
        ("redis://a,b", "redis.cluster"),
        ("redis+sentinel://a/yards/zero", "number of a database"),
    ],
)
def test_a_bad_url_is_refused(open_one: type, url: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        open_one(url)
    assert "secret" not in str(caught.value)


def test_a_sentinel_may_have_an_address_of_ipv6() -> None:
    target = read_url("redis+sentinel://a:26379,[::1]:26380,b/m", 1.0)
    assert isinstance(target.book, Sentinels)
    assert target.book.sentinels == [("a", 26379), ("::1", 26380), ("b", 26379)]


def test_user_and_password_may_stand_beside_the_url(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given a password that no URL could have as it is
    raw = "se/c?r#e@t:%"
    monkeypatch.setenv("TOKENYARD_REDIS_USERNAME", "ann")
    (tmp_path / "password").write_text(raw + "\n")
    monkeypatch.setenv("TOKENYARD_REDIS_PASSWORD_FILE", str(tmp_path / "password"))

    def given(url: str) -> tuple[object, object]:
        options = open_connection(with_credentials(url)).connection_pool.connection_kwargs
        return options.get("username"), options.get("password")

    # I expect it to be used, by a file or a variable, where the URL has none itself.
    assert given("redis://host/2?socket_keepalive=yes") == ("ann", raw)
    assert given("redis://bob@host") == given("redis://host?username=bob") == ("bob", raw)
    assert given("redis://bob:b@host") == ("bob", "b")
    monkeypatch.setenv("TOKENYARD_REDIS_PASSWORD", "other")
    assert given("redis://host") == ("ann", "other")
    monkeypatch.delenv("TOKENYARD_REDIS_PASSWORD")
    (tmp_path / "password").unlink()
    with pytest.raises(SettingsError, match=r"TOKENYARD_REDIS_PASSWORD_FILE: .*No such file"):
        with_credentials("redis://host")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost", "redis://localhost"),
        ("redis://:secret@host:6379/0", "redis://host:6379/0"),
        ("rediss://user:secret@host/1?ssl_cert_reqs=none", "rediss://host/1?ssl_cert_reqs=none"),
        ("redis://u:se/cret@host/0", "redis://host/0"),
        ("redis://u:se?cr#et@host/0", "redis://host/0"),
        ("redis://host/0?pass%77ord=s@cret&db=1", "redis://host/0?db=1"),
        ("ann:secret@host:6379", "host:6379"),
        ("127.0.0.1:6379", "127.0.0.1:6379"),
        ("unix:///run/redis.sock?db=2&password=secret", "unix:///run/redis.sock?db=2"),
        ("unix://user@/run/redis.sock?password=secret&db=2", "unix:///run/redis.sock?db=2"),
        (
            SENTINELS + "&sentinel_password=t",
            "redis+sentinel://a:1,b/yards/2?ssl_ca_certs=ca&sentinel_username=s",
        ),
    ],
)
def test_messages_show_no_secrets(url: str, shown: str) -> None:
    assert public_url(url) == shown
