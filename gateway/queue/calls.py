"""Commands and scripts over the gateway's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from redis.exceptions import NoScriptError

from tokenyard.broker.connection import AsyncRedis, translated
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.keys import Keys
from tokenyard.scripts.calls import Arg, Call, command_of, run_async

T = TypeVar("T")
Command = tuple[Arg, ...]

#: How long to wait for a script that only the leader may load.
_MISSING_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker of one yard; its calls raise the errors of `tokenyard.protocol.errors`."""

    connection: AsyncRedis
    url: str
    keys: Keys

    async def command(self, *command: Arg) -> Any:
        """Carry out one command."""
        return (await self.carry_out([command]))[0]

    async def carry_out(self, commands: Sequence[Command]) -> list[Any]:
        """Carry out commands in one round trip; a `NoScriptError` stands among the answers."""
        run: Any = self.connection
        with translated(self.url):
            async with run.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not isinstance(answer, NoScriptError):
                    raise answer
        return answers

    async def call(self, wanted: Call[T]) -> T:
        """Make one call."""
        with translated(self.url):
            return wanted.read(await run_async(self.connection, wanted, _MISSING_S))

    async def call_behind(self, before: Sequence[Command], calls: Sequence[Call[T]]) -> list[T]:
        """Carry out commands and make calls, in this order and one round trip."""
        answers = await self.carry_out([*before, *map(command_of, calls)])
        return [
            await self.call(one) if isinstance(answer, NoScriptError) else one.read(answer)
            for one, answer in zip(calls, answers[len(before) :], strict=True)
        ]


# What is asked for at one moment shares a round trip.

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_Waiting = tuple[Item, "asyncio.Future[Answer]"]


class Bursts(Generic[Item, Answer]):
    """Sends items in bursts: while one call is under way, the next burst gathers.

    ``send`` makes the call for some items, and returns an answer to each in their order.
    """

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]) -> None:
        self._send = send
        self._waiting: list[_Waiting[Item, Answer]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Answer:
        """Send one item; raises what its call raised.

        A `ValueError` says that the item cannot be written.
        """
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answered))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="gateway-burst")
        return await answered

    async def _run(self) -> None:
        try:
            while self._waiting:
                burst, self._waiting = self._waiting, []
                await self._send_burst(burst)
        finally:
            self._task = None

    async def _send_burst(self, burst: Sequence[_Waiting[Item, Answer]]) -> None:
        try:
            answers = await self._send([item for item, _ in burst])
            answered_by = list(zip(burst, answers, strict=True))
        except TokenyardError as error:
            _fail(burst, error)
        except Exception as error:  # noqa: BLE001 - whatever a value that cannot be written raises
            if len(burst) == 1:
                _fail(burst, ValueError(f"the request cannot be written: {error}"))
                return
            for one in burst:  # those beside it can be written
                await self._send_burst([one])
        else:
            for (_, answered), answer in answered_by:
                if not answered.done():
                    answered.set_result(answer)


def _fail(burst: Sequence[_Waiting[Item, Answer]], error: Exception) -> None:
    for _, answered in burst:
        if not answered.done():
            answered.set_exception(error)
