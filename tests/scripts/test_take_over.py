"""take_over.lua: a new leader publishes the handshake."""

from __future__ import annotations

import redis

from tests.support.yard import PlayedYard
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

LONG_MS = 60_000


def test_fresh_yard_gets_its_handshake(
    scripts: Scripts, connection: redis.Redis, keys: Keys
) -> None:
    token = scripts.lead("ann", LONG_MS)

    scripts.take_over(token, {"protocol": 1, "models": "[]"})

    info = connection.hgetall(keys.info)
    assert (info[b"protocol"], info[b"models"], info[b"epoch"]) == (b"1", b"[]", b"1")


def test_running_yard_keeps_its_entries_and_counts(yard: PlayedYard) -> None:
    entry = yard.submit().entry
    queued = yard.queued_tokens()

    yard.scripts.take_over(yard.token, {"models": "[1]"})

    assert [waiting for waiting, _ in yard.intake()] == [entry]
    assert yard.queued_tokens() == queued > 0
