"""The asynchronous client with the methods of the synchronous one, for one suite of both."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
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


class Blocking:
    """An `AsyncClient`, or a handle of one, whose methods are called from outside its loop."""

    def __init__(self, loop: Loop, inner: AsyncClient | AsyncHandle) -> None:
        self._loop = loop
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return functools.partial(self._call, found) if callable(found) else found

    def __iter__(self) -> Iterator[Any]:
        return self._loop.each(aiter(self._inner))

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        answer = method(*args, **options)
        if isinstance(answer, AsyncIterator):
            return self._loop.each(answer)
        try:
            return self._blocking(self._loop.run(answer))
        except SubmissionError as refused:
            refused.accepted = self._blocking(refused.accepted)
            raise

    def _blocking(self, answer: Any) -> Any:
        if isinstance(answer, list):
            return [self._blocking(one) for one in answer]
        return Blocking(self._loop, answer) if isinstance(answer, AsyncHandle) else answer


def blocking_client(loop: Loop, *args: Any, **options: Any) -> Any:
    """An `AsyncClient` with the methods of the synchronous one."""

    async def make() -> AsyncClient:
        return AsyncClient(*args, **options)

    return Blocking(loop, loop.run(make()))
