"""A whole client by docs/protocol.md, with the standard library only: it streams one answer.

    python3 examples/minimal_client.py 127.0.0.1 6379 '12+34='

It survives a broken connection. A long-lived client also needs a bound on the whole wait, longer
pauses while Redis is away, and a look at the ledger after some seconds of silence.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any


class Redis:
    """A connection that speaks RESP 2."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port), timeout=10)
        self.file = self.socket.makefile("rb")

    def __call__(self, *words: object) -> Any:
        """The answer to one command."""
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded]
        self.socket.sendall(b"*%d\r\n%s" % (len(encoded), b"".join(parts)))
        return self.answer()

    def answer(self) -> Any:
        """What the server sends next: bytes, a number, a list of these, or None."""
        line = self.file.readline()
        if not line:
            raise ConnectionError("closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind == b"$":
            return None if rest == b"-1" else self.file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self.answer() for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest


def ask(
    host: str, port: int, prompt: str, yard: str = "main", client: str = "anon", **params: object
) -> Iterator[str]:
    """Yield pieces of text; the last one completes the reply."""
    key = f"tokenyard:{{{yard}}}:"
    request = str(uuid.uuid4())
    fields = ["id", request, "client", client, "prompt", prompt]
    fields += ["stream", "1", "params", json.dumps(params)]
    redis: Redis | None = None
    submitted, last, shown, have = False, b"0", "", 0
    while True:
        try:
            redis = redis or Redis(host, port)
            if not submitted:  # the same id again is the same request
                redis("XADD", key + "intake:normal", "*", *fields)
                submitted = True
            stream = f"{key}reply:{client}/{request}"
            answer = redis("XREAD", "BLOCK", 5000, "STREAMS", stream, last)
        except OSError:
            redis = None
            time.sleep(0.5)
            continue
        for entry, flat in answer[0][1] if answer else []:
            last = entry
            reply: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
            tokens = struct.unpack(f"<{len(reply[b'tokens']) // 4}i", reply[b"tokens"])
            text = reply.get(b"text", b"").decode()
            if reply[b"event"] == b"delta" and int(reply[b"seq"]) == have:
                have += len(tokens)
                shown += text
                yield text
            elif reply[b"event"] == b"result":
                if reply[b"status"] != b"completed":
                    raise RuntimeError(reply.get(b"error", reply[b"status"]).decode())
                yield text[len(shown) :]
                return


if __name__ == "__main__":
    for piece in ask(sys.argv[1], int(sys.argv[2]), sys.argv[3], max_tokens=8, temperature=0):
        print(piece, end="", flush=True)
    print()
