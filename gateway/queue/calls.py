"""Scripts over the gateway's connection."""

from __future__ import annotations

from typing import Final, TypeVar

from tokenyard.broker.connection import AsyncRedis, translated
from tokenyard.scripts import Call, run_async

T = TypeVar("T")

#: How long to wait for a script that only the leader may load.
_MISSING_S: Final = 5.0


async def call(connection: AsyncRedis, url: str, wanted: Call[T]) -> T:
    """Make one call; raises the errors of `tokenyard.protocol.errors`."""
    with translated(url):
        return wanted.read(await run_async(connection, wanted, _MISSING_S))
