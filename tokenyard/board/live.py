"""Live streams: the blocks of an open page, each when it changes, as server-sent events."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import anyio
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tokenyard import clock
from tokenyard.board.settings import BoardOptions

EVENTS: Final = "text/event-stream"
_FULL: Final = "As many pages are open as the board keeps up to date; this one waits for a place."
#: A page for which there is no place asks again after so long.
_FULL_RETRY_MS: Final = 30_000
#: The blocks by name, or None: the stream ends.
Blocks = Callable[[], Awaitable[dict[str, str] | None]]


class LiveStreams:
    """The live streams of a board, a bounded number."""

    def __init__(self, options: BoardOptions) -> None:
        self._most = options.max_streams
        self._longest_s = options.stream_s
        self._open: set[anyio.Event] = set()  # each ends a stream
        self._has_ended = False

    def answer(self, blocks: Blocks, every_s: float) -> Response:
        """A stream of ``blocks``, asked for again after each ``every_s``."""
        if self._has_ended:
            return Response(status_code=503, headers={"retry-after": "1"})
        if len(self._open) >= self._most:
            told = f"retry: {_FULL_RETRY_MS}\n{_event('live_error', _FULL)}"
            return Response(told, media_type=EVENTS)
        ending = anyio.Event()
        self._open.add(ending)
        return _Stream(self._events(blocks, every_s, ending), lambda: self._open.discard(ending))

    def end(self) -> None:
        """End all streams and refuse new ones."""
        self._has_ended = True
        for ending in self._open:
            ending.set()

    async def _events(
        self, blocks: Blocks, every_s: float, ending: anyio.Event
    ) -> AsyncIterator[str]:
        """Each block when it changes, and a sign of life, which detects clients that are gone."""
        until = clock.monotonic() + self._longest_s
        sent: dict[str, str] = {}
        while clock.monotonic() < until and not ending.is_set():
            found = await blocks()
            if found is None:
                return
            for name, html in found.items():
                digest = hashlib.sha256(html.encode(errors="replace")).hexdigest()
                if sent.get(name) != digest:
                    sent[name] = digest
                    yield _event(name, html)
            yield ": still here\n\n"
            with anyio.move_on_after(every_s):
                await ending.wait()


class _Stream(StreamingResponse):
    """A stream that gives its place back, however it ends."""

    def __init__(self, events: AsyncIterator[str], over: Callable[[], None]) -> None:
        # Also through a proxy that would rather collect it.
        super().__init__(events, media_type=EVENTS, headers={"x-accel-buffering": "no"})
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; see the ASGI specification."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


def _event(name: str, html: str) -> str:
    lines = "\n".join(f"data: {line}" for line in html.splitlines() or [""])
    return f"event: {name}\n{lines}\n\n"
