"""The coordinators that stand by.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from typing import Any

from tokenyard.admin.snapshot import LeaderView
from tokenyard.protocol.yard import Yard


def read_standbys(yard: Yard, leader: LeaderView | None, now_ms: int) -> list[str]:
    """Names of the coordinators that have said in the last half minute that they stand by."""
    found: Any = yard.connection.zrange(yard.keys.standbys, 0, -1, withscores=True)
    names = {name.decode(errors="replace") for name, until_ms in found if until_ms > now_ms}
    return sorted(names - ({leader.name} if leader else set()))
