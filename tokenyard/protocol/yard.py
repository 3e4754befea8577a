"""One yard of a broker: what every reader and every operation takes to reach it."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from tokenyard.protocol.keys import Keys


@dataclass(frozen=True)
class Yard:
    """A yard and its broker. Threads may share it, as they may share the connection.

    ``url`` is the broker's, where something is to be said or opened by it.
    """

    connection: redis.Redis
    keys: Keys
    url: str = ""
