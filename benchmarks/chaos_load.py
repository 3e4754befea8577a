"""One client process of a chaos run: asks, reads all replies, and writes down what it sees.

    python -m benchmarks.chaos_load '<LoadSettings as JSON>'

Each thread has one request under way at a time, in one of the ways in which a program may use
the yard: streaming or not, through `tokenyard.Client` or by a plain XADD and XREAD; some are
submitted a second time, some are cancelled.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import redis
from msgspec import Struct

from benchmarks.chaos_answers import draw_request, to_request
from benchmarks.chaos_history import (
    Accepted,
    Asked,
    CancelAsked,
    Ended,
    HistoryWriter,
    Seen,
    Trouble,
    now,
)
from tokenyard import Client
from tokenyard.client import Handle
from tokenyard.connection import open_connection
from tokenyard.errors import RequestFailed, TokenyardError
from tokenyard.keys import PRIORITY_CLASSES, Keys, PriorityClass
from tokenyard.replies import Reply, decode_replies, to_result
from tokenyard.settings import EngineName
from tokenyard.wire import request_fields, unpack_tokens

T = TypeVar("T")
_RETRY_S: Final = (0.05, 0.3)
_BLOCK_MS: Final = 1_000
#: A reader waits so long for a result; the run ends before.
_PATIENCE_S: Final = 3_600.0
_PLAIN_SHARE: Final = 0.3
_STREAM_SHARE: Final = 0.7
_AGAIN_SHARE: Final = 0.12
_CANCEL_SHARE: Final = 0.06


class LoadSettings(Struct, frozen=True, kw_only=True):
    """What a client process is told."""

    url: str
    yard: str
    engine: EngineName
    client: str
    seed: int
    seconds: float  # no new request after that
    threads: int
    pause_s: float  # between two requests of a thread, on average
    history: str  # file


class Load:
    """The client process."""

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        self._keys = Keys(settings.yard)
        self._history = HistoryWriter(Path(settings.history))
        self._client = Client(
            settings.url,
            yard=settings.yard,
            client_id=settings.client,
            connect_timeout_s=60.0,
            result_timeout_s=_PATIENCE_S,
        )
        self._redis = open_connection(settings.url, retries=0)
        self._stop_at = 0.0

    def run(self) -> None:
        """Ask for the time that was set, then wait for what is still due."""
        self._stop_at = time.monotonic() + self._settings.seconds
        threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True)
            for number in range(self._settings.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._client.close()
        self._history.close()

    def _work(self, number: int) -> None:
        settings = self._settings
        draw = random.Random(f"load {settings.seed} {settings.client} {number}")
        count = 0
        while time.monotonic() < self._stop_at:
            asked = draw_request(
                draw,
                settings.engine,
                client=settings.client,
                request_id=f"{number}-{count}",
                stream=draw.random() < _STREAM_SHARE,
            )
            count += 1
            self._history.write(asked)
            way = self._plainly if draw.random() < _PLAIN_SHARE else self._by_client
            way(asked, draw)
            time.sleep(draw.uniform(0.0, 2 * settings.pause_s))

    # Through the client

    def _by_client(self, asked: Asked, draw: random.Random) -> None:
        handle = self._submit(asked, draw)
        self._history.write(Accepted(now(), asked.client, asked.id))
        fate = draw.random()
        if fate < _CANCEL_SHARE:
            self._aside(lambda: self._cancel(asked), draw.uniform(0.0, 1.0))
        elif fate < _CANCEL_SHARE + _AGAIN_SHARE / 2:
            self._aside(lambda: self._duplicate(asked), draw.uniform(0.0, 1.0))
        self._follow(asked, handle, "client", draw)
        if fate > 1 - _AGAIN_SHARE / 2:
            self._follow(asked, self._submit(asked, draw), "again", draw)

    def _submit(self, asked: Asked, draw: random.Random) -> Handle:
        """Submit until it is acknowledged; a repetition has the same id."""
        options: dict[str, Any] = {"seed": asked.seed, "max_tokens": asked.max_tokens}
        options |= {"id": asked.id, "stream": asked.stream, "temperature": 0.0}
        options["ignore_eos"] = asked.ignore_eos
        options["priority_class"] = _class_of(asked)
        prompt = asked.text if asked.text is not None else asked.tokens or []
        return self._insist(asked, draw, lambda: self._client.submit(prompt, **options))

    def _follow(self, asked: Asked, handle: Handle, reader: str, draw: random.Random) -> None:
        """Write down every delta, the tail among them, and the result."""
        while True:
            try:
                with contextlib.suppress(RequestFailed):
                    for delta in handle:
                        seen = (delta.seq, delta.tokens, delta.text)
                        self._history.write(Seen(now(), reader, asked.client, asked.id, *seen))
                result = handle.wait(0.0)
            except TokenyardError as fault:
                # The client has lost its connection for good: a new reader begins anew.
                self._trouble(asked, fault)
                reader += "'"
                handle = self._submit(asked, draw)
                continue
            code = result.error.code if result.error else ""
            self._history.write(
                Ended(
                    now(),
                    reader,
                    asked.client,
                    asked.id,
                    result.status,
                    result.tokens,
                    text=result.text,
                    code=code,
                )
            )
            return

    def _cancel(self, asked: Asked) -> None:
        cancel = getattr(self._client, "cancel", None)
        if cancel is None:
            return
        self._history.write(CancelAsked(now(), asked.client, asked.id))
        try:
            cancel(asked.id)
        except TokenyardError as fault:
            self._trouble(asked, fault)

    def _duplicate(self, asked: Asked) -> None:
        """The same request once more, by another connection and past the client."""
        with contextlib.suppress(redis.RedisError):
            self._xadd(asked, f"replies:{asked.client}")

    def _aside(self, act: Callable[[], None], seconds: float) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()

    # By plain commands

    def _plainly(self, asked: Asked, draw: random.Random) -> None:
        """XADD until it is acknowledged, then XREAD until the result."""
        self._insist(asked, draw, lambda: self._xadd(asked, ""))
        self._history.write(Accepted(now(), asked.client, asked.id))
        if draw.random() < _AGAIN_SHARE:
            self._insist(asked, draw, lambda: self._xadd(asked, ""))
        stream, after = self._keys.reply(asked.client, asked.id), b"0"
        while True:
            entries = self._insist(asked, draw, partial(self._read, stream, after))
            for entry, fields in entries:
                after = entry
                for reply in decode_replies(fields):
                    self._note(asked, reply)
                    if reply.event == "result":
                        return

    def _xadd(self, asked: Asked, reply_to: str) -> None:
        fields: dict[Any, Any] = dict(request_fields(to_request(asked, reply_to)))
        self._redis.xadd(self._keys.intake(_class_of(asked)), fields)

    def _read(self, stream: str, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer: Any = self._redis.xread({stream: after}, block=_BLOCK_MS)
        return [entry for _, entries in answer or () for entry in entries]

    def _note(self, asked: Asked, reply: Reply) -> None:
        if reply.event == "delta":
            tokens = unpack_tokens(reply.tokens)
            seen = (reply.seq, tokens, reply.text)
            self._history.write(Seen(now(), "plain", asked.client, asked.id, *seen))
            return
        result = to_result(reply)
        code = result.error.code if result.error else ""
        self._history.write(
            Ended(
                now(),
                "plain",
                asked.client,
                asked.id,
                result.status,
                result.tokens,
                seq=result.seq,
                text=result.text,
                code=code,
            )
        )

    # Both

    def _insist(self, asked: Asked, draw: random.Random, act: Callable[[], T]) -> T:
        while True:
            try:
                return act()
            except (TokenyardError, redis.RedisError) as fault:
                self._trouble(asked, fault)
                time.sleep(draw.uniform(*_RETRY_S))

    def _trouble(self, asked: Asked, fault: Exception) -> None:
        error = f"{type(fault).__name__}: {fault}"
        self._history.write(Trouble(now(), asked.client, asked.id, error))


def _class_of(asked: Asked) -> PriorityClass:
    """Follows from the id, so that repetitions need not be told."""
    return PRIORITY_CLASSES[sum(asked.id.encode()) % len(PRIORITY_CLASSES)]


if __name__ == "__main__":
    Load(msgspec.json.decode(sys.argv[1], type=LoadSettings)).run()
