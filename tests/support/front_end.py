"""A front end of vLLM, as far as its engine sees it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq

from tests.support.waiting import eventually

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode
_ENGINE = (0).to_bytes(2, "little")
_WAIT_MS = 60_000
STOP, LENGTH, ABORT, ERROR = range(4)


@dataclass
class Answered:
    """What an engine has sent for one request."""

    pieces: list[list[int]] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)
    finish: int | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for piece in self.pieces for token in piece]


class FrontEnd:
    """Listens where an engine introduces itself, and asks it."""

    def __init__(self, port: int = 0) -> None:
        self._context = zmq.Context()
        self._door = self._socket(zmq.ROUTER, port)
        self._inputs, self._outputs = self._socket(zmq.ROUTER), self._socket(zmq.PULL)
        self.answers: dict[str, Answered] = defaultdict(Answered)
        self.ready: list[dict[str, Any]] = []
        self.told: dict[int, list[Any]] = {}

    def _socket(self, kind: int, port: int = 0) -> zmq.Socket[bytes]:
        found = self._context.socket(kind)
        found.rcvtimeo = _WAIT_MS
        found.bind(f"tcp://127.0.0.1:{port or '*'}")
        return found

    @property
    def address(self) -> str:
        """Where engines introduce themselves."""
        return _address(self._door)

    @property
    def port(self) -> int:
        """The port of `address`."""
        return int(self.address.rpartition(":")[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End as a killed process does."""
        self._context.destroy(linger=0)

    def hear(self) -> list[bytes]:
        """Wait for the next message of one who introduces itself."""
        return self._door.recv_multipart()

    def meet(self) -> None:
        """Wait for an engine, and take it."""
        self.greet()
        self.wait_for_engine()

    def greet(self) -> None:
        """Wait for an engine, and tell it where to go."""
        engine, hello = self.hear()
        assert _decode(hello)["status"] == "HELLO"
        told = {"inputs": [_address(self._inputs)], "outputs": [_address(self._outputs)]}
        self._door.send_multipart([engine, _encode({"addresses": told, "parallel_config": {}})])
        assert _decode(self.hear()[1])["status"] == "READY"

    def wait_for_engine(self) -> None:
        """Wait until an engine says that it is there."""
        engine, ready = self._inputs.recv_multipart()
        assert engine == _ENGINE
        self.ready.append(_decode(ready))

    def send(self, kind: bytes, *frames: bytes) -> None:
        """Send the engine a message."""
        self._inputs.send_multipart([_ENGINE, kind, *frames])

    def ask(self, request_id: str, tokens: list[int], name: str = "", **params: Any) -> None:
        """Ask for an answer; ``name`` is the id that the client gave."""
        known = {"max_tokens": 16, "temperature": 0.0, "output_kind": 1, "_eos_token_id": 2}
        self._ask(request_id, tokens, known | params, None, name or request_id)

    def pool(self, request_id: str, tokens: list[int], *params: Any) -> None:
        """Ask for numbers; ``params`` are those of pooling, in their order."""
        self._ask(request_id, tokens, None, params, request_id)

    def _ask(self, request_id: str, tokens: list[int], *fields: Any) -> None:
        *params, name = fields
        beside = [0.0, None, None, None, None, None, 0, 0, 0, None, False, name]
        self.send(b"\x00", _encode([request_id, tokens, None, *params, *beside]))

    def abort(self, *request_ids: str) -> None:
        """Say that nobody waits any more."""
        self.send(b"\x01", _encode(list(request_ids)))

    def read(self) -> None:
        """Take what has come."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(_decode(self._outputs.recv(zmq.NOBLOCK)))

    def _take(self, message: list[Any]) -> None:
        _, outputs, _, _, told, *_ = [*message, None]
        assert outputs or told, "vllm-rs dies of a message without anything"
        if told:
            self.told[told[0]] = told
        for request_id, tokens, *rest in outputs:
            answer = self.answers[request_id]
            if answer.finish is not None:  # a front end knows it no more, and ignores that
                assert (tokens, rest[3]) == ([], ERROR), f"{request_id} goes on after its end"
                continue
            answer.outputs.append([request_id, tokens, *rest])
            if tokens:
                answer.pieces.append(tokens)
            answer.finish = rest[3] if len(rest) > 3 else None

    def wait(self, request_id: str) -> Answered:
        """The whole answer."""

        def ended() -> bool:
            self.read()
            return self.answers[request_id].finish is not None

        eventually(ended)
        return self.answers[request_id]

    def wait_for_tokens(self, request_id: str, count: int = 1) -> Answered:
        """The answer once it has so many tokens."""

        def begun() -> bool:
            self.read()
            return len(self.answers[request_id].tokens) >= count

        eventually(begun)
        return self.answers[request_id]


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt(zmq.LAST_ENDPOINT).decode()
