"""Scripts over an asynchronous connection."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, TypeVar

from redis.exceptions import NoPermissionError, NoScriptError

from tokenyard.broker.connection import AsyncRedis, translated
from tokenyard.protocol.errors import ScriptsMissing
from tokenyard.scripts import MISSING_EVERY_S, Call, command_of, source

T = TypeVar("T")

#: How long to wait for a script that only the leader may load.
_MISSING_S: Final = 5.0


async def call(connection: AsyncRedis, url: str, wanted: Call[T]) -> T:
    """Make one call; raises the errors of `tokenyard.protocol.errors`."""
    run: Any = connection.execute_command  # redis-py gives no types for it
    give_up = time.monotonic() + _MISSING_S
    with translated(url):
        while True:
            try:
                return wanted.read(await run(*command_of(wanted)))
            except NoScriptError:
                try:
                    await run("SCRIPT LOAD", source(wanted.script))
                except NoPermissionError as error:
                    if time.monotonic() >= give_up:
                        raise ScriptsMissing(wanted.script) from error
                    await asyncio.sleep(MISSING_EVERY_S)
