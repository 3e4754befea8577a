"""take_over.lua: a new leader prepares the yard from any state."""

from __future__ import annotations

import pytest
import redis

from tests.support.yard import QueuedRequest, Yard
from tokenyard.protocol.keys import GROUP, INTAKE_CLASSES, Keys
from tokenyard.scripts import Scripts

LONG_MS = 60_000


def groups(connection: redis.Redis, stream: str) -> list[bytes]:
    return [group["name"] for group in connection.xinfo_groups(stream)]


def test_fresh_yard_gets_its_groups_and_its_handshake(
    scripts: Scripts, connection: redis.Redis, keys: Keys
) -> None:
    token = scripts.lead("ann", LONG_MS)

    assert scripts.take_over(token, {"protocol": 1, "models": "[]"})

    for stream in (*map(keys.intake, INTAKE_CLASSES), keys.events, keys.capacity, keys.arrivals):
        assert groups(connection, stream) == [GROUP.encode()]
    info = connection.hgetall(keys.info)
    assert (info[b"protocol"], info[b"models"], info[b"epoch"]) == (b"1", b"[]", b"1")


def test_running_yard_keeps_its_pending_entries_and_counts(yard: Yard) -> None:
    yard.submit()
    yard.read()
    queued = yard.queued_tokens()

    assert yard.scripts.take_over(yard.token, {"models": "[1]"})

    assert yard.pending() == 1
    assert yard.queued_tokens() == queued > 0


def test_destroyed_group_is_created_again_with_the_waiting_entries(
    yard: Yard, waiting: QueuedRequest
) -> None:
    yard.connection.xgroup_destroy(yard.keys.intake("normal"), GROUP)
    yard.connection.delete(yard.keys.intake("high"))

    assert yard.scripts.take_over(yard.token, {"models": "[]"})

    assert yard.read() == [waiting.entry]
    assert yard.read("high") == []


def test_key_of_another_type_is_an_error_with_the_reason(yard: Yard) -> None:
    yard.connection.delete(yard.keys.intake("low"))
    yard.connection.set(yard.keys.intake("low"), "x")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        yard.scripts.take_over(yard.token, {"models": "[]"})
