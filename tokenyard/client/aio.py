"""The asynchronous client: asyncio around `tokenyard.client.core`; its twin is `sync`.

One task, the listener, reads the replies to all of a client's requests over one blocking
connection; it starts at the first request. A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Self, TypeVar, Unpack

import redis.asyncio

from tokenyard import clock
from tokenyard.broker.connection import (
    AsyncRedis,
    ConnectionOptions,
    open_async_connection,
    translated,
)
from tokenyard.broker.tasks import end_task
from tokenyard.client.build import PreparedRequest
from tokenyard.client.handshake import YardInfo
from tokenyard.client.ledger import Cancellation, RequestState
from tokenyard.client.operations import Ask, Delay, Operation, Steps, advance, checked
from tokenyard.client.options import Item, Prompt, RequestOptions, SharedOptions
from tokenyard.client.pending import DeltaCursor, PendingRequest, SubmittedRequest, succeeded
from tokenyard.client.submission import require_valid
from tokenyard.client.sync import LISTEN_TIMEOUT_S, ClientBase
from tokenyard.client.tokenization import local_text_of
from tokenyard.client.window import MapWindow
from tokenyard.protocol.errors import SubmissionError, TokenyardError
from tokenyard.protocol.replies import Delta, Result
from tokenyard.scripts.calls import Call, run_async

log = logging.getLogger("tokenyard.client")


class AsyncEvent:
    """`asyncio.Event` for one waiting task, whose `wait` has a time-out.

    `asyncio.wait_for` makes a task for each wait, and a timer for each wait costs as much as the
    wait for a streamed token itself. So one timer serves many waits, and is set again when it fires
    too early.
    """

    __slots__ = ("_due", "_fires_at", "_is_set", "_loop", "_timer", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._due = self._fires_at = 0.0  # in the loop's time
        self._timer: asyncio.TimerHandle | None = None

    def set(self, _: object = None) -> None:
        """Set the event; the argument is that of a listener, and ignored."""
        self._is_set = True
        self._wake()

    def clear(self) -> None:
        """Clear the event."""
        self._is_set = False

    async def wait(self, timeout_s: float) -> None:
        """Wait until the event is set, at most ``timeout_s``."""
        if self._is_set or timeout_s <= 0:
            return
        self._due = self._loop.time() + timeout_s
        if self._timer is None or self._due < self._fires_at:
            self._arm()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.close()
        self._fires_at = self._due
        self._timer = self._loop.call_at(self._fires_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._due:
            self._arm()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


T = TypeVar("T")


class AsyncClient(ClientBase):
    """`tokenyard.Client` for asyncio: the same arguments, methods and errors."""

    def _open(self, url: str, options: ConnectionOptions) -> None:
        self._connection = open_async_connection(url, **options)
        self._starting = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `tokenyard.Client.start`."""
        if not self._has_started:
            await self.info()

    async def close(self) -> None:
        """See `tokenyard.Client.close`."""
        if self._core.state.is_closed:
            return
        self._core.close()
        if self._listener is not None:
            await end_task(self._listener, LISTEN_TIMEOUT_S)
        with contextlib.suppress(TokenyardError):
            await self._drive(self._core.leave())
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def info(self) -> YardInfo:
        """See `tokenyard.Client.info`."""
        info = await self._drive(self._core.handshake())
        self._has_started = True
        return info

    async def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncHandle:
        """See `tokenyard.Client.submit`."""
        await self._listen()
        prepared = self._core.builder.prepare(prompt, options)
        [handle] = await self._submit([prepared])
        return handle

    async def submit_many(
        self, items: Sequence[Item], **shared: Unpack[SharedOptions]
    ) -> list[AsyncHandle]:
        """See `tokenyard.Client.submit_many`."""
        await self._listen()
        return await self._submit(require_valid(self._core.builder.prepare_many(items, shared)))

    async def _submit(self, prepared: Sequence[PreparedRequest]) -> list[AsyncHandle]:
        try:
            requests = await self._drive(self._core.submitter.submit(prepared))
        except SubmissionError as error:
            error.accepted = [AsyncHandle(self, pending) for pending in error.accepted]
            raise
        return [AsyncHandle(self, pending) for pending in requests]

    async def map(
        self,
        items: Iterable[Item],
        *,
        window: int = 1000,
        ordered: bool = False,
        patience_s: float = math.inf,
        **shared: Unpack[SharedOptions],
    ) -> AsyncIterator[tuple[int, Result]]:
        """See `tokenyard.Client.map`."""
        await self._listen()
        updated = AsyncEvent()
        state = MapWindow(
            items,
            window,
            ordered=ordered,
            wake=updated.set,
            timeout_s=self._core.state.result_timeout_s,
            patience_s=patience_s,
        )
        try:
            while not state.is_over:
                updated.clear()
                state.add(self._core.builder.prepare_map(state.pull(), shared))
                await self._drive(self._core.submitter.submit_window(state))
                for numbered in state.ready():
                    yield numbered
                if state.is_stuck:
                    raise await self._drive(self._core.submitter.timeout_error(state))
                await updated.wait(state.wait_s())
        finally:
            self._core.forget(state.running)
            updated.close()

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

    # Carrying out the core's operations

    async def _drive(self, steps: Steps[T], connection: AsyncRedis | None = None) -> T:
        """Carry out operations until the steps end."""
        answer: Any = None
        while True:
            try:
                step = advance(steps, answer)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                answer = await self._do(step, connection or self._connection)
            except TokenyardError as error:
                answer = error

    async def _do(self, operation: Operation, connection: AsyncRedis) -> Any:
        with translated(self._core.state.url):
            match operation:
                case Delay():
                    return await clock.pause(operation.seconds)
                case Ask():
                    return await _ask(connection, operation)
                case _:
                    return operation.read(await self._call(operation))

    async def _call(self, call: Call[Any]) -> Any:
        """Call a script; waits for one that only the leader may load."""
        return await run_async(self._connection, call, self._core.script_timeout_s(call))

    async def _listen(self) -> None:
        """Start this client and its listener, once."""
        if self._core.state.is_closed:
            raise RuntimeError("the client is closed")
        if self._listener is not None:
            return
        async with self._starting:
            await self.start()
            if self._listener is None:
                name = f"tokenyard-replies-{self.client_id}"
                self._listener = asyncio.create_task(self._run_listener(), name=name)

    async def _run_listener(self) -> None:
        """The body of the listener."""
        url = self._core.state.url
        failure = TokenyardError("the client has ended")
        try:
            async with open_async_connection(
                url, timeout_s=LISTEN_TIMEOUT_S, retries=0
            ) as connection:
                await self._drive(self._core.listen(), connection)
        except TokenyardError as error:
            failure = error
        except Exception as error:
            log.exception("the client's listener failed")
            failure = TokenyardError(f"the client has failed: {error!r}")
        finally:
            self._listener = None  # the next request starts a new one
            self._core.state.router.forget_all(failure)


async def _ask(connection: redis.asyncio.Redis, ask: Ask) -> list[Any]:
    run: Any = connection  # redis-py gives no types for commands by name
    if len(ask.commands) == 1:
        return [await run.execute_command(*ask.commands[0])]
    async with run.pipeline(transaction=False) as pipeline:
        for command in ask.commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
    return checked(answers, ask)


class _UpdateEvent(AsyncEvent):
    """Set by each update of a pending request, inside a ``with``."""

    __slots__ = ("_pending",)

    def __init__(self, pending: PendingRequest) -> None:
        super().__init__()
        self._pending = pending

    def __enter__(self) -> Self:
        self._pending.listeners.append(self.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._pending.listeners.remove(self.set)
        self.close()


class AsyncHandle(SubmittedRequest):
    """`tokenyard.Handle` for asyncio."""

    def __init__(self, client: AsyncClient, pending: PendingRequest) -> None:
        super().__init__(pending)
        self._client = client

    async def cancel(self) -> Cancellation:
        """See `tokenyard.Handle.cancel`."""
        return await self._client.cancel(self.id)

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as in the twin
        """See `tokenyard.Handle.result`."""
        return succeeded(await self.wait(timeout))

    async def wait(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109 - as in the twin
        """See `tokenyard.Handle.wait`."""
        pending, deadline = self._pending, self._client.wait_deadline(timeout)
        with _UpdateEvent(pending) as updated:
            while not pending.is_over:
                updated.clear()
                await updated.wait(deadline.left_s(pending))
        return pending.result()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """See `tokenyard.Handle.__iter__`."""
        pending = self._pending
        cursor = DeltaCursor(pending)
        deadline = self._client.wait_deadline()
        with _UpdateEvent(pending) as updated:
            while not cursor.is_over:
                deadline.renew()
                while not cursor.has_updates:
                    updated.clear()  # else an update that was read already would end this wait
                    await updated.wait(deadline.left_s(pending))
                if cursor.awaits_tokenizer:
                    await asyncio.to_thread(local_text_of, pending.folder)
                for delta in cursor.read():
                    yield delta

    async def status(self) -> RequestState:
        """See `tokenyard.Handle.status`."""
        return await self._client.status(self.id)
