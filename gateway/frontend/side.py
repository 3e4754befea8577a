"""A second event loop, in a thread of its own, for what would hold up the first for too long.

Both take turns at the interpreter, so what runs here should not be one call that takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gateway.http.errors import GatewayError

T = TypeVar("T")

#: Of the large bodies of one client that may wait for their turn.
_MOST_BYTES: Final = 64 * 1024 * 1024
#: After which a thread that computes lets the event loop go on, if that has something to do.
_GIVE_WAY_S: Final = 0.001
#: After a large body, until what it took is given back.
_TRIM_S: Final = 0.5


class SideLoop:
    """Runs coroutines beside the event loop that made it, one at a time for each client."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._turns: dict[str, _Turn] = {}
        self._trimming: asyncio.TimerHandle | None = None
        sys.setswitchinterval(_GIVE_WAY_S)
        threading.Thread(target=self._loop.run_forever, name="side-loop", daemon=True).start()

    async def run(self, client: str, size: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the side loop, in the caller's context, when it is the client's turn.

        ``size`` is the bytes of the body that it is about.
        The turn is over with the work, or when the work calls `end_turn`. A client who sends many
        large bodies so waits for itself, and others do not. Raises `GatewayError` where too many
        wait already.
        """
        turn = self._turns.setdefault(client, _Turn())
        turn.waiting_bytes += size
        try:
            if turn.waiting_bytes > max(_MOST_BYTES, size):
                message = "too many of your large requests are being read; send fewer at a time"
                raise GatewayError(429, message, retry_after_s=1.0)
            async with turn.lock:
                is_over = asyncio.Event()
                place = _Place(asyncio.get_running_loop(), is_over)
                running = asyncio.run_coroutine_threadsafe(_run_away(place, work), self._loop)
                work_is_over = asyncio.wrap_future(running)
                work_is_over.add_done_callback(lambda _: is_over.set())
                try:
                    await is_over.wait()
                except asyncio.CancelledError:
                    work_is_over.cancel()
                    raise
        finally:
            self._loop.call_soon_threadsafe(self._trim_soon)
            turn.waiting_bytes -= size
            if not turn.waiting_bytes:
                self._turns.pop(client, None)
        return await work_is_over

    def _trim_soon(self) -> None:
        if self._trimming is None:
            self._trimming = self._loop.call_later(_TRIM_S, self._trim)

    def _trim(self) -> None:
        """Give freed memory back: glibc keeps what tokenizers freed in each of their threads."""
        self._trimming = None
        with contextlib.suppress(AttributeError):  # another C library has no such function
            ctypes.CDLL(None).malloc_trim(0)


class _Turn:
    """Of one client: the size of large bodies that wait, the one that is read included."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting_bytes = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where work in the side loop came from."""

    home: asyncio.AbstractEventLoop
    turn_is_over: asyncio.Event


_PLACE: Final[ContextVar[_Place | None]] = ContextVar("gateway_side", default=None)


async def _run_away(place: _Place, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    _PLACE.set(place)
    return await work()


def end_turn() -> None:
    """The body of the request being served is rendered; its client's next may be."""
    place = _PLACE.get()
    if place is not None:
        place.home.call_soon_threadsafe(place.turn_is_over.set)


async def at_home(work: Coroutine[Any, Any, T]) -> T:
    """Await what belongs to the first loop, wherever this is called."""
    place = _PLACE.get()
    if place is None:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, place.home))


def tell_home(function: Callable[..., object], *arguments: object) -> None:
    """Call what belongs to the first loop, wherever this is called; soon, but not now."""
    place = _PLACE.get()
    if place is None:
        function(*arguments)
    else:
        place.home.call_soon_threadsafe(function, *arguments)


async def each_at_home(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items of a generator of the first loop, wherever this is called."""

    async def following() -> T | None:
        return await anext(items, None)

    try:
        while (item := await at_home(following())) is not None:
            yield item
    finally:
        await at_home(items.aclose())
