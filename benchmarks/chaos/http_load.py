"""A client process of a chaos run that asks the gateways: retries, resumes, and records it.

    python -m benchmarks.chaos.http_load '<HttpLoadSettings as JSON>'

Each request has an `Idempotency-Key`. After a lost connection or a 503 it is asked for again at any
gateway: a stream behind the last event that came. Some are asked for by OpenAI's SDK with its own
retries, and some once more when they are over, to compare the bytes. A process that replaces a
killed one first takes over its unanswered requests.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.chaos.answers import draw_over_http
from benchmarks.chaos.history import (
    Accepted,
    Asked,
    Born,
    Broken,
    Ended,
    HistoryWriter,
    Resumed,
    Seen,
    Trouble,
    ViolationKind,
    inheritance,
    now,
)
from benchmarks.chaos.http_reader import AskAgain, BrokenPromise, Reading
from benchmarks.chaos.http_sdk import SdkReading, has_sdk
from gateway.http.principal import Principal
from gateway.http.records import durable_id
from tokenyard.protocol.settings import EngineName

_RETRY_S: Final = (0.05, 0.3)
_AGAIN_SHARE: Final = 0.12
_SDK_SHARE: Final = 0.15
_STREAM_SHARE: Final = 0.7


class HttpLoadSettings(Struct, frozen=True, kw_only=True):
    """The settings of a client process."""

    ports: list[int]  # of the gateways
    api_keys: dict[str, str]  # of the tenants whose requests it sends, by chance; "" is none
    model: str
    engine: EngineName
    name: str
    seed: int
    stop: str  # file: no new requests once it exists
    threads: int
    long_threads: int  # threads that always have a long stream under way
    pause_s: float  # mean time between two requests of a thread
    history: str  # file


class HttpLoad:
    """The client process."""

    def __init__(self, settings: HttpLoadSettings) -> None:
        self._settings = settings
        self._history = HistoryWriter(Path(settings.history))

    def run(self) -> None:
        """Ask until told to stop, then wait for the outstanding answers."""
        settings = self._settings
        life, due = inheritance(Path(settings.history))
        self._history.write(Born(now(), settings.name))
        calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (self._take_up, (asked, life)) for asked in due
        ]
        calls += [(self._work, (life, number)) for number in range(settings.threads)]
        threads = [threading.Thread(target=call, args=args, daemon=True) for call, args in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._history.close()

    def _take_up(self, asked: Asked, life: int) -> None:
        self._get(asked, f"http {life}", random.Random(f"{life} {asked.id}"))

    def _work(self, life: int, number: int) -> None:
        settings = self._settings
        draw = random.Random(f"http {settings.seed} {settings.name} {life} {number}")
        is_long = number < settings.long_threads
        stop, count = Path(settings.stop), 0
        while not stop.exists():
            key = f"{settings.name}-{life}-{number}-{count}"
            tenant = draw.choice(list(settings.api_keys))
            client = Principal(tenant=tenant).client
            asked = draw_over_http(
                draw,
                settings.engine,
                client=client,
                request_id=f"cmpl-{durable_id(client, key)}-0",
                key=key,
                stream=is_long or draw.random() < _STREAM_SHARE,
                is_long=is_long,
            )
            asked = msgspec.structs.replace(asked, tenant=tenant)
            count += 1
            self._history.write(asked)
            by_sdk = not is_long and has_sdk() and draw.random() < _SDK_SHARE
            first = self._get(asked, "sdk" if by_sdk else "http", draw, by_sdk=by_sdk)
            if draw.random() < _AGAIN_SHARE and first is not None:
                self._compare(asked, first, self._get(asked, "again", draw))
            if not is_long:
                time.sleep(draw.uniform(0.0, 2 * settings.pause_s))

    def _get(
        self, asked: Asked, reader: str, draw: random.Random, *, by_sdk: bool = False
    ) -> Reading | None:
        """Ask until there is a whole answer; None if a gateway broke a promise."""
        make = SdkReading if by_sdk else Reading
        reading = make(
            durable_id(asked.client, asked.key),
            asked.key,
            _body(asked, self._settings.model),
            self._settings.api_keys[asked.tenant],
        )
        port = draw.choice(self._settings.ports)
        while not reading.is_over:
            try:
                self._read(asked, reader, reading, port)
            except AskAgain as reason:
                port = draw.choice(self._settings.ports)
                self._history.write(Trouble(now(), asked.client, asked.id, str(reason)))
                time.sleep(draw.uniform(*_RETRY_S))
            except BrokenPromise as broken:
                self._break(asked, broken.kind, f"{reader}: {broken.what}")
                return None
        status = "failed" if reading.error else "completed"
        end = (status, reading.tokens, None, reading.text, reading.error)
        self._history.write(Ended(now(), reader, asked.client, asked.id, *end))
        return reading

    def _read(self, asked: Asked, reader: str, reading: Reading, port: int) -> None:
        """Read on at one gateway."""
        was_accepted, number, shown = reading.is_accepted, reading.number, len(reading.tokens)
        try:
            for piece in reading.read(port):
                seen = (shown, piece.tokens, piece.text)
                self._history.write(Seen(now(), reader, asked.client, asked.id, *seen))
                shown += len(piece.tokens)
        finally:
            if reading.is_accepted and not was_accepted:
                self._history.write(Accepted(now(), asked.client, asked.id))
            if 0 < number < reading.number:
                self._history.write(Resumed(now(), asked.client, asked.id, reading.hints))

    def _compare(self, asked: Asked, first: Reading, again: Reading | None) -> None:
        """Compare the bytes; a failure in the middle of a stream is a status when asked again."""
        if again is not None and not first.error and first.raw and first.raw != again.raw:
            pair = zip(first.raw, again.raw, strict=False)
            at = next((n for n, (a, b) in enumerate(pair) if a != b), -1)
            self._break(asked, "wrong", f"asked again, the answer differs at byte {at}")

    def _break(self, asked: Asked, kind: ViolationKind, what: str) -> None:
        self._history.write(Broken(now(), asked.client, asked.id, kind, what))


def _body(asked: Asked, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": asked.text if asked.text is not None else asked.tokens,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "stream": asked.stream,
        "ignore_eos": asked.ignore_eos,
        "return_token_ids": True,
    }
    return body if asked.seed is None else body | {"seed": asked.seed}


if __name__ == "__main__":
    HttpLoad(msgspec.json.decode(sys.argv[1], type=HttpLoadSettings)).run()
