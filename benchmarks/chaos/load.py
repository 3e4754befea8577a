"""One client process of a chaos run: sends requests, reads all replies, and records both.

    python -m benchmarks.chaos.load '<LoadSettings as JSON>'

Each thread has one request under way at a time, in one of the ways in which a program may use
the yard: streaming or not, through `tokenyard.Client` or with plain XADD and XREAD; some requests
are submitted twice, some are cancelled. A process that replaces a killed one first takes over its
unanswered requests. A few threads send only long streams, back to back, so that every fault
interrupts one.
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

from benchmarks.chaos.answers import draw_request, to_request
from benchmarks.chaos.history import (
    Accepted,
    Asked,
    Born,
    CancelAsked,
    Ended,
    HistoryWriter,
    Seen,
    Trouble,
    inheritance,
    now,
)
from tokenyard import Client
from tokenyard.broker.connection import open_connection
from tokenyard.client.sync import Handle
from tokenyard.protocol.errors import RequestFailed, TokenyardError
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys, PriorityClass
from tokenyard.protocol.replies import Reply, Result, decode_replies, to_result
from tokenyard.protocol.settings import EngineName
from tokenyard.protocol.wire import request_fields, unpack_tokens

T = TypeVar("T")
_RETRY_S: Final = (0.05, 0.3)
_BLOCK_MS: Final = 1_000
#: Longest wait of a reader for a result, beyond the end of the run.
_PATIENCE_S: Final = 3_600.0
#: Suffix of the ids of requests sent with plain XADD.
_PLAIN: Final = "p"
_PLAIN_SHARE: Final = 0.3
#: Length of a phase in seconds. In every third phase only long requests stream, so that a worker
#: without a lease mostly learns this from a refused result, not from a refused delta.
_PHASE_S: Final = 6.0
_STREAM_SHARE: Final = 0.9
_AGAIN_SHARE: Final = 0.12
_CANCEL_SHARE: Final = 0.06


class LoadSettings(Struct, frozen=True, kw_only=True):
    """The settings of a client process."""

    url: str
    yard: str
    engine: EngineName
    client: str
    seed: int
    stop: str  # file: no new requests once it exists
    threads: int
    long_threads: int  # threads that always have a long stream under way
    pause_s: float  # mean time between two requests of a thread
    history: str  # file
    tenants: list[str]  # whose requests it sends, by chance; "" is none


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

    def run(self) -> None:
        """Send requests until told to stop, then wait for the outstanding answers."""
        life, due = inheritance(Path(self._settings.history))
        self._history.write(Born(now(), self._settings.client))
        draw = random.Random(life)
        threads = [
            threading.Thread(target=self._take_up, args=(asked, life, draw), daemon=True)
            for asked in due
        ]
        threads += [
            threading.Thread(target=self._work, args=(life, number), daemon=True)
            for number in range(self._settings.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._client.close()
        self._history.close()

    def _take_up(self, asked: Asked, life: int, draw: random.Random) -> None:
        """Read the reply to a request of an earlier life."""
        if asked.id.endswith(_PLAIN):
            self._read_plainly(asked, f"plain {life}", draw)
            return
        handle = self._insist(asked, draw, lambda: self._client.attach(asked.id))
        self._follow(asked, handle, f"client {life}", draw)

    def _work(self, life: int, number: int) -> None:
        settings = self._settings
        draw = random.Random(f"load {settings.seed} {settings.client} {life} {number}")
        is_long = number < settings.long_threads
        stop = Path(settings.stop)
        count = 0
        while not stop.exists():
            is_plain = draw.random() < _PLAIN_SHARE
            asked = draw_request(
                draw,
                settings.engine,
                client=settings.client,
                request_id=f"{life}-{number}-{count}{_PLAIN if is_plain else ''}",
                stream=is_long or (_is_streaming() and draw.random() < _STREAM_SHARE),
                is_long=is_long,
            )
            asked = msgspec.structs.replace(asked, tenant=draw.choice(settings.tenants))
            count += 1
            self._history.write(asked)
            way = self._plainly if is_plain else self._by_client
            way(asked, draw)
            if not is_long:
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
        """Submit until acknowledged; retries use the same id."""
        options: dict[str, Any] = {"seed": asked.seed, "max_tokens": asked.max_tokens}
        options |= {"id": asked.id, "stream": asked.stream, "temperature": 0.0}
        options["ignore_eos"] = asked.ignore_eos
        options |= {"priority_class": _class_of(asked), "tenant": asked.tenant}
        prompt = asked.text if asked.text is not None else asked.tokens or []
        return self._insist(asked, draw, lambda: self._client.submit(prompt, **options))

    def _follow(self, asked: Asked, handle: Handle, reader: str, draw: random.Random) -> None:
        """Record every delta, including the last, and the result."""
        while True:
            try:
                with contextlib.suppress(RequestFailed):
                    for delta in handle:
                        seen = (delta.seq, delta.tokens, delta.text)
                        self._history.write(Seen(now(), reader, asked.client, asked.id, *seen))
                result = handle.wait(0.0)
            except TokenyardError as fault:
                # The client has lost its connection for good: a new reader starts over.
                self._trouble(asked, fault)
                reader += "'"
                handle = self._submit(asked, draw)
                continue
            self._history.write(_ended(asked, reader, result))
            return

    def _cancel(self, asked: Asked) -> None:
        self._history.write(CancelAsked(now(), asked.client, asked.id))
        try:
            self._client.cancel(asked.id)
        except TokenyardError as fault:
            self._trouble(asked, fault)

    def _duplicate(self, asked: Asked) -> None:
        """Submit the same request again over another connection, without the client."""
        with contextlib.suppress(redis.RedisError):
            self._xadd(asked, f"replies:{asked.client}")

    def _aside(self, act: Callable[[], None], seconds: float) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()

    # With plain commands

    def _plainly(self, asked: Asked, draw: random.Random) -> None:
        """XADD until acknowledged, then XREAD until the result."""
        self._insist(asked, draw, lambda: self._xadd(asked, ""))
        self._history.write(Accepted(now(), asked.client, asked.id))
        if draw.random() < _AGAIN_SHARE:
            self._insist(asked, draw, lambda: self._xadd(asked, ""))
        self._read_plainly(asked, "plain", draw)

    def _read_plainly(self, asked: Asked, reader: str, draw: random.Random) -> None:
        """XREAD from the first reply to the result."""
        stream, after = self._keys.reply(asked.client, asked.id), b"0"
        while True:
            entries = self._insist(asked, draw, partial(self._read, stream, after))
            for entry, fields in entries:
                after = entry
                for reply in decode_replies(fields):
                    self._note(asked, reader, reply)
                    if reply.event == "result":
                        return

    def _xadd(self, asked: Asked, reply_to: str) -> None:
        fields: dict[Any, Any] = dict(request_fields(to_request(asked, reply_to)))
        self._redis.xadd(self._keys.intake(_class_of(asked)), fields)

    def _read(self, stream: str, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer: Any = self._redis.xread({stream: after}, block=_BLOCK_MS)
        return [entry for _, entries in answer or () for entry in entries]

    def _note(self, asked: Asked, reader: str, reply: Reply) -> None:
        if reply.event == "delta":
            tokens = unpack_tokens(reply.tokens)
            seen = (reply.seq, tokens, reply.text)
            self._history.write(Seen(now(), reader, asked.client, asked.id, *seen))
            return
        result = to_result(reply)
        self._history.write(_ended(asked, reader, result, result.seq))

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


def _ended(asked: Asked, reader: str, result: Result, seq: int | None = None) -> Ended:
    code = result.error.code if result.error else ""
    whose = (now(), reader, asked.client, asked.id)
    return Ended(*whose, result.status, result.tokens, seq, result.text, code)


def _is_streaming() -> bool:
    return int(time.time() / _PHASE_S) % 3 != 0


def _class_of(asked: Asked) -> PriorityClass:
    """The priority class, derived from the id so that retries use the same one."""
    return PRIORITY_CLASSES[sum(asked.id.encode()) % len(PRIORITY_CLASSES)]


if __name__ == "__main__":
    Load(msgspec.json.decode(sys.argv[1], type=LoadSettings)).run()
