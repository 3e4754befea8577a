"""The asynchronous client with the methods of the synchronous one, for one suite of both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from tokenyard import AsyncClient, AsyncHandle
from tokenyard.protocol.errors import SubmissionError

T = TypeVar("T")
LIMIT_S = 60.0


class Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def each(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def advance() -> T:
            return await anext(items)

        try:
            while True:
                try:
                    item = self.run(advance())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self.run(items.aclose())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


class BlockingClient:
    """`AsyncClient`, called from outside its loop."""

    def __init__(self, loop: Loop, *args: Any, **kwargs: Any) -> None:
        self._loop = loop

        async def make() -> AsyncClient:
            return AsyncClient(*args, **kwargs)

        self._client = loop.run(make())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def start(self) -> None:
        self._loop.run(self._client.start())

    def close(self) -> None:
        self._loop.run(self._client.close())

    def info(self) -> Any:
        return self._loop.run(self._client.info())

    def submit(self, prompt: Any, **options: Any) -> BlockingHandle:
        with self._blocking_accepted():
            handle = self._loop.run(self._client.submit(prompt, **options))
        return BlockingHandle(self._loop, handle)

    def submit_many(self, items: Any, **shared: Any) -> list[BlockingHandle]:
        with self._blocking_accepted():
            handles = self._loop.run(self._client.submit_many(items, **shared))
        return [BlockingHandle(self._loop, handle) for handle in handles]

    @contextlib.contextmanager
    def _blocking_accepted(self) -> Iterator[None]:
        try:
            yield
        except SubmissionError as refused:
            refused.accepted = [BlockingHandle(self._loop, each) for each in refused.accepted]
            raise

    def map(self, items: Any, **options: Any) -> Iterator[Any]:
        return self._loop.each(self._client.map(items, **options))

    def attach(self, request_id: str) -> BlockingHandle:
        return BlockingHandle(self._loop, self._loop.run(self._client.attach(request_id)))

    def status(self, request_id: str) -> Any:
        return self._loop.run(self._client.status(request_id))

    def cancel(self, request_id: str) -> Any:
        return self._loop.run(self._client.cancel(request_id))


class BlockingHandle:
    """`AsyncHandle`, called from outside its loop."""

    def __init__(self, loop: Loop, handle: AsyncHandle) -> None:
        self._loop = loop
        self._handle = handle

    @property
    def id(self) -> str:
        return self._handle.id

    @property
    def position(self) -> int | None:
        return self._handle.position

    @property
    def eta_s(self) -> float | None:
        return self._handle.eta_s

    def cancel(self) -> Any:
        return self._loop.run(self._handle.cancel())

    def result(self, timeout: float | None = None) -> Any:
        return self._loop.run(self._handle.result(timeout))

    def wait(self, timeout: float | None = None) -> Any:
        return self._loop.run(self._handle.wait(timeout))

    def status(self) -> Any:
        return self._loop.run(self._handle.status())

    def __iter__(self) -> Iterator[Any]:
        return self._loop.each(aiter(self._handle))
