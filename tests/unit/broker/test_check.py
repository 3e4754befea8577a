"""What is said of a Redis at the door, from what it says of itself."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from redis import exceptions

from tokenyard.broker.check import check_broker
from tokenyard.protocol.errors import BrokerUnsuitable

SOUND = {"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "aof_enabled": 1}


def check(info: Any, probe: Exception | None = None) -> list[str]:
    """What is said of a server that says this of itself, and of a script this."""
    connection = Mock(info=Mock(side_effect=[info]), eval=Mock(side_effect=probe, return_value=1))
    return check_broker(connection, "main")


def test_a_well_configured_server_has_no_warnings() -> None:
    assert check(SOUND) == []


@pytest.mark.parametrize(
    ("said", "warning"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "Set maxmemory-policy noeviction"),
        ({"aof_enabled": 0}, "Set appendonly yes"),
        ({"aof_last_write_status": "err"}, "full disk"),
    ],
)
def test_each_doubt_is_one_sentence_that_says_what_to_do(
    said: dict[str, Any], warning: str
) -> None:
    [only] = check(SOUND | said)
    assert warning in only


@pytest.mark.parametrize("version", ["5.0.14", "6.2.14"])
def test_a_server_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(BrokerUnsuitable, match=version):
        check(SOUND | {"redis_version": version})


def test_a_node_without_the_yard_names_the_one_that_has_it() -> None:
    with pytest.raises(BrokerUnsuitable, match=r"10\.0\.0\.7:7001"):
        check(SOUND, exceptions.MovedError("1234 10.0.0.7:7001"))


def test_a_replica_is_refused() -> None:
    with pytest.raises(BrokerUnsuitable, match="replica"):
        check(SOUND, exceptions.ReadOnlyError("READONLY"))


def test_a_server_that_hides_its_settings_is_used_with_a_warning() -> None:
    [only] = check(exceptions.NoPermissionError("no"))
    assert "INFO" in only


def test_other_errors_are_left_to_the_caller() -> None:
    with pytest.raises(exceptions.ConnectionError):
        check(exceptions.ConnectionError("gone"))
