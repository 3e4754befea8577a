"""Dead letters that a test writes."""

from __future__ import annotations

from typing import Any

from tests.support.builders import entry_fields, make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.wire import Request

MANY = 10_000


def bury(
    yard: PlayedYard,
    request: Request | None = None,
    reason: str = "POISONED: 2 workers crashed while it ran alone",
    **more: bytes,
) -> str:
    """Write a dead letter; its name."""
    dead = {b"dead_reason": reason.encode(errors="surrogatepass"), b"dead_sid": b"low/1-0"}
    fields = entry_fields(request or make_request(), **more) | dead
    added: Any = yard.connection.xadd(yard.keys.dead, fields)  # type: ignore[arg-type]
    return added.decode()


def bury_many(yard: PlayedYard, count: int) -> list[str]:
    """Write letters of two clients in turn, every tenth of another reason."""
    pipeline = yard.connection.pipeline(transaction=False)
    for number in range(count):
        request = make_request(f"q{number}", client="ann" if number % 2 else "bob", model="adder")
        reason = b"INFERENCE_ERROR: failed 3 times" if number % 10 == 0 else b"POISONED: signal 11"
        fields = entry_fields(request) | {b"dead_reason": reason, b"dead_sid": b"low/1-0"}
        pipeline.xadd(yard.keys.dead, fields)  # type: ignore[arg-type]
    return [added.decode() for added in pipeline.execute()]


def left(yard: PlayedYard) -> list[str]:
    return [entry.decode() for entry, _ in yard.connection.xrange(yard.keys.dead)]
