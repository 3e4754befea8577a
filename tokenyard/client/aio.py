"""The asynchronous client: asyncio around `tokenyard.client.core`; its twin is `sync`.

One task hears the replies to all of a client's requests over one blocking connection; it starts
at the first request. A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final, Self, TypeVar, Unpack

import redis.asyncio
from redis.exceptions import NoPermissionError, NoScriptError

from tokenyard.broker.connection import AsyncRedis, open_async_connection, translated
from tokenyard.broker.pools import DEFAULT_MAX_CONNECTIONS, DEFAULT_POOL_TIMEOUT_S
from tokenyard.client.async_event import AsyncEvent
from tokenyard.client.build import Item, PreparedRequest, Prompt, RequestOptions, SharedOptions
from tokenyard.client.core import ClientCore, sound
from tokenyard.client.handshake import YardInfo
from tokenyard.client.ledger import Cancellation, RequestState
from tokenyard.client.operations import Ask, Operation, Pause, Steps, checked
from tokenyard.client.pending import DeltaCursor, Patience, PendingRequest
from tokenyard.client.sync import (
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_RESULT_TIMEOUT_S,
    LISTEN_TIMEOUT_S,
)
from tokenyard.client.window import MapWindow
from tokenyard.process.running import find_yard
from tokenyard.protocol.errors import (
    DeadlineUnmeetable,
    IdReused,
    QueueFull,
    ScriptsMissing,
    TokenyardError,
)
from tokenyard.protocol.replies import Delta, Result
from tokenyard.scripts import MISSING_EVERY_S, Call, command_of, source

T = TypeVar("T")

_CANCEL_EVERY_S: Final = 0.05


class AsyncClient:
    """`tokenyard.Client` for asyncio: the same arguments, methods and errors."""

    def __init__(
        self,
        url: str | None = None,
        yard: str | None = None,
        client_id: str | None = None,
        tokenizer: object | None = None,
        *,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        result_timeout_s: float = DEFAULT_RESULT_TIMEOUT_S,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        pool_timeout_s: float = DEFAULT_POOL_TIMEOUT_S,
    ) -> None:
        url, yard = find_yard(url, yard)
        self._core = ClientCore(
            url, yard, client_id, tokenizer, connect_timeout_s, result_timeout_s
        )
        self._connection = open_async_connection(
            url, max_connections=max_connections, pool_timeout_s=pool_timeout_s
        )
        self._starting = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None
        self._has_met = False

    @property
    def client_id(self) -> str:
        """The name under which replies come."""
        return self._core.client_id

    async def start(self) -> None:
        """See `tokenyard.Client.start`."""
        if not self._has_met:
            await self.info()

    async def close(self) -> None:
        """See `tokenyard.Client.close`."""
        if self._core.is_closed:
            return
        self._core.close()
        if self._listener is not None:
            await _end(self._listener)
        with contextlib.suppress(TokenyardError):
            await self._drive(self._core.take_leave())
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def info(self) -> YardInfo:
        """See `tokenyard.Client.info`."""
        info = await self._drive(self._core.meet())
        self._has_met = True
        return info

    async def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncHandle:
        """See `tokenyard.Client.submit`."""
        await self._listen()
        draft = self._core.draft(prompt, options)
        [handle] = await self._submit([draft])
        return handle

    async def submit_many(
        self, items: Sequence[Item], **shared: Unpack[SharedOptions]
    ) -> list[AsyncHandle]:
        """See `tokenyard.Client.submit_many`."""
        await self._listen()
        return await self._submit(sound(self._core.draft_many(items, shared)))

    async def _submit(self, drafts: Sequence[PreparedRequest]) -> list[AsyncHandle]:
        try:
            exchanges = await self._drive(self._core.submit(drafts))
        except (QueueFull, DeadlineUnmeetable, IdReused) as refused:
            refused.accepted = [AsyncHandle(self, exchange) for exchange in refused.accepted]
            raise
        return [AsyncHandle(self, exchange) for exchange in exchanges]

    async def map(
        self,
        items: Iterable[Item],
        *,
        window: int = 1000,
        ordered: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> AsyncIterator[tuple[int, Result]]:
        """See `tokenyard.Client.map`."""
        news = AsyncEvent()
        state = MapWindow(items, window, ordered=ordered, wake=news.come)
        await self._listen()
        patience_s = self._core.result_timeout_s
        give_up = time.monotonic() + patience_s
        try:
            while not state.is_over:
                news.clear()
                state.add(self._core.draft_many(state.pull(), shared))
                if await self._drive(self._core.submit_window(state)):
                    give_up = time.monotonic() + patience_s
                for numbered in state.ready():
                    yield numbered
                    give_up = time.monotonic() + patience_s
                now = time.monotonic()
                if now >= give_up:
                    raise await self._drive(self._core.give_up(state))
                await news.wait(state.wait_s(now, give_up - now))
        finally:
            self._core.forget(state.running)
            news.close()

    async def attach(self, request_id: str) -> AsyncHandle:
        """See `tokenyard.Client.attach`."""
        await self._listen()
        return AsyncHandle(self, await self._drive(self._core.attach(request_id)))

    async def status(self, request_id: str) -> RequestState:
        """See `tokenyard.Client.status`."""
        return await self._drive(self._core.status(request_id))

    async def cancel(self, request_id: str) -> Cancellation:
        """See `tokenyard.Client.cancel`."""
        return await self._drive(self._core.cancel(request_id))

    async def wait_for(
        self, exchange: PendingRequest, is_enough: Callable[[], bool], timeout_s: float | None
    ) -> None:
        """See `tokenyard.Client.wait_for`."""
        with _Hearing(exchange) as news:
            patience = self.patience(timeout_s)
            while not is_enough():
                news.clear()
                await news.wait(patience.left_s(exchange))

    def patience(self, timeout_s: float | None = None) -> Patience:
        """A bound on waits, the client's own where no time is given. For handles."""
        return Patience(timeout_s, self._core.result_timeout_s)

    # Carrying out the dialogue

    async def _drive(self, steps: Steps[T], connection: AsyncRedis | None = None) -> T:
        """Carry out operations until the steps end."""
        answer: Any = None
        fault: TokenyardError | None = None
        while True:
            try:
                step = steps.send(answer) if fault is None else steps.throw(fault)
            except StopIteration as end:
                result: T = end.value
                return result
            answer, fault = None, None
            try:
                answer = await self._do(step, connection or self._connection)
            except TokenyardError as error:
                fault = error

    async def _do(self, operation: Operation, connection: AsyncRedis) -> Any:
        with translated(self._core.url):
            match operation:
                case Pause():
                    return await asyncio.sleep(operation.seconds)
                case Ask():
                    return await _ask(connection, operation)
                case _:
                    return operation.read(await self._call(operation))

    async def _call(self, call: Call[Any]) -> Any:
        """Call a script; one that the leader is to load is waited for."""
        give_up = time.monotonic() + self._core.patience_s(call)
        run: Any = self._connection.execute_command  # redis-py gives no types for it
        command = command_of(call)
        while True:
            try:
                return await run(*command)
            except NoScriptError:
                try:
                    await run("SCRIPT LOAD", source(call.script))
                except NoPermissionError as fault:
                    if time.monotonic() >= give_up:
                        raise ScriptsMissing(call.script) from fault
                    await asyncio.sleep(MISSING_EVERY_S)

    async def _listen(self) -> None:
        """Meet the yard and start to hear replies, once."""
        if self._core.is_closed:
            raise RuntimeError("the client is closed")
        if self._listener is not None:
            return
        async with self._starting:
            await self.start()
            if self._listener is None:
                name = f"tokenyard-replies-{self.client_id}"
                self._listener = asyncio.create_task(self._hear(), name=name)

    async def _hear(self) -> None:
        """The listener's life."""
        url = self._core.url
        fault = TokenyardError("the client has failed, see its log")
        try:
            async with open_async_connection(
                url, timeout_s=LISTEN_TIMEOUT_S, retries=0
            ) as connection:
                await self._drive(self._core.listen(), connection)
        except TokenyardError as error:
            fault = error
        finally:
            self._listener = None  # the next request starts another
            self._core.break_off(fault)


async def _ask(connection: redis.asyncio.Redis, ask: Ask) -> list[Any]:
    run: Any = connection  # redis-py gives no types for commands by name
    if len(ask.commands) == 1 and ask.wait is None:
        return [await run.execute_command(*ask.commands[0])]
    async with run.pipeline(transaction=False) as pipeline:
        for command in ask.commands:
            pipeline.execute_command(*command)
        if ask.wait is not None:
            pipeline.execute_command(*ask.wait)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
    return checked(answers, ask)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it is over.

    Cancelled again and again, because redis-py loses a cancellation that comes while it connects.
    """
    give_up = time.monotonic() + LISTEN_TIMEOUT_S
    while not task.done() and time.monotonic() < give_up:
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_EVERY_S)


class _Hearing(AsyncEvent):
    """Comes whenever an exchange has brought something, inside a ``with``."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: PendingRequest) -> None:
        super().__init__()
        self._exchange = exchange

    def __enter__(self) -> Self:
        self._exchange.listeners.append(self.come)
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange.listeners.remove(self.come)
        self.close()


class AsyncHandle:
    """`tokenyard.Handle` for asyncio."""

    def __init__(self, client: AsyncClient, exchange: PendingRequest) -> None:
        self._client = client
        self._exchange = exchange

    def __repr__(self) -> str:
        return f"<AsyncHandle {self.id!r}>"

    @property
    def id(self) -> str:
        """The id of the request."""
        return self._exchange.id

    @property
    def position(self) -> int | None:
        """See `tokenyard.Handle.position`."""
        return self._exchange.position

    @property
    def eta_s(self) -> float | None:
        """See `tokenyard.Handle.eta_s`."""
        return self._exchange.eta_s

    async def cancel(self) -> Cancellation:
        """See `tokenyard.Handle.cancel`."""
        return await self._client.cancel(self.id)

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as in the twin
        """See `tokenyard.Handle.result`."""
        await self._wait(lambda: self._exchange.is_over, timeout)
        return self._exchange.success()

    async def wait(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as in the twin
        """See `tokenyard.Handle.wait`."""
        await self._wait(lambda: self._exchange.is_over, timeout)
        return self._exchange.result()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """See `tokenyard.Handle.__iter__`."""
        exchange = self._exchange
        cursor = DeltaCursor(exchange)
        patience = self._client.patience()
        with _Hearing(exchange) as news:
            while not cursor.is_over:
                patience.renew()
                while not cursor.has_news:
                    news.clear()  # what was read long ago would end this wait
                    await news.wait(patience.left_s(exchange))
                for delta in cursor.read():
                    yield delta

    async def status(self) -> RequestState:
        """See `tokenyard.Handle.status`."""
        return await self._client.status(self.id)

    async def _wait(self, is_enough: Callable[[], bool], timeout_s: float | None) -> None:
        await self._client.wait_for(self._exchange, is_enough, timeout_s)
