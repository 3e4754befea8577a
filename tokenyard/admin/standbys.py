"""The coordinators that stand by.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from typing import Any

import redis

from tokenyard.admin.snapshot import LeaderView
from tokenyard.protocol.keys import Keys


def read_standbys(
    connection: redis.Redis, keys: Keys, leader: LeaderView | None, now_ms: int
) -> list[str]:
    """Names of the coordinators that have said in the last half minute that they stand by."""
    found: Any = connection.zrange(keys.standbys, 0, -1, withscores=True)
    names = {name.decode(errors="replace") for name, until_ms in found if until_ms > now_ms}
    return sorted(names - ({leader.name} if leader else set()))
