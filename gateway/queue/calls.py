"""Commands and scripts over the gateway's connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from redis.exceptions import NoScriptError

from tokenyard.broker.connection import AsyncRedis, translated
from tokenyard.scripts import Arg, Call, command_of, run_async

T = TypeVar("T")
Command = tuple[Arg, ...]

#: How long to wait for a script that only the leader may load.
_MISSING_S: Final = 5.0


async def call(connection: AsyncRedis, url: str, wanted: Call[T]) -> T:
    """Make one call; raises the errors of `tokenyard.protocol.errors`."""
    with translated(url):
        return wanted.read(await run_async(connection, wanted, _MISSING_S))


async def call_behind(
    connection: AsyncRedis, url: str, before: Sequence[Command], calls: Sequence[Call[T]]
) -> list[T]:
    """Carry out commands and make calls, in this order and one round trip; raises as `call`."""
    with translated(url):
        answers = await carry_out(connection, [*before, *map(command_of, calls)])
        return [
            one.read(
                await run_async(connection, one, _MISSING_S)
                if isinstance(answer, NoScriptError)
                else answer
            )
            for one, answer in zip(calls, answers[len(before) :], strict=True)
        ]


async def carry_out(connection: AsyncRedis, commands: Sequence[Command]) -> list[Any]:
    """Carry out commands in one round trip; raises redis-py's errors but `NoScriptError`."""
    run: Any = connection
    async with run.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, NoScriptError):
            raise answer
    return answers
