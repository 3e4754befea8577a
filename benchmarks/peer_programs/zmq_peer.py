"""An in-memory coordinator with ZMQ and msgpack, without durability, modelled on Megatron Core's.

A ROUTER socket passes requests to the engines in turn, and replies to the client. The client sends
immediately and polls for replies, every 5 ms while there are none, with one future per request,
like Megatron's `InferenceClient`. The engines answer immediately.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import sys
from collections.abc import Sequence
from typing import Any

import load
import msgpack
import zmq

REGISTER, SUBMIT, REPLY = 0, 1, 2
IDLE_S = 0.005


def coordinator(url: str) -> None:
    """Run the coordinator."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(url)
    engines: list[bytes] = []
    turn, ids = 0, itertools.count()
    asked: dict[int, tuple[bytes, int]] = {}
    waiting: list[tuple[bytes, Any]] = []
    while True:
        sender, packed = socket.recv_multipart()
        message = msgpack.unpackb(packed)
        if message[0] == REGISTER:
            engines.append(sender)
        elif message[0] == SUBMIT:
            waiting.append((sender, message))
        else:
            for number, tokens in message[1]:
                client, name = asked.pop(number)
                socket.send_multipart([client, msgpack.packb([name, tokens])])
        while engines and waiting:
            client, (_, name, tokens, params) = waiting.pop(0)
            number = next(ids)
            asked[number] = (client, name)
            forwarded = msgpack.packb([SUBMIT, number, tokens, params])
            socket.send_multipart([engines[turn % len(engines)], forwarded])
            turn += 1


def worker(url: str) -> None:
    """Run an engine, which answers all pending requests in one reply."""
    socket = _dealer(url)
    socket.send(msgpack.packb([REGISTER]))
    while True:
        batch = [msgpack.unpackb(socket.recv())]
        while socket.poll(0):
            batch.append(msgpack.unpackb(socket.recv()))
        made = [(number, tokens[-load.RESULT_TOKENS :]) for _, number, tokens, _ in batch]
        socket.send(msgpack.packb([REPLY, made]))


def _dealer(url: str) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(url)
    return socket


class Client:
    """A client with one future per request."""

    def __init__(self, url: str) -> None:
        self._socket = _dealer(url)
        self._ids = itertools.count()
        self._futures: dict[int, asyncio.Future[list[int]]] = {}

    def submit(self, tokens: list[int]) -> asyncio.Future[list[int]]:
        """Send one request."""
        name = next(self._ids)
        params = {"temperature": 0.0, "num_tokens_to_generate": load.RESULT_TOKENS}
        self._socket.send(msgpack.packb([SUBMIT, name, tokens, params]))
        self._futures[name] = asyncio.get_running_loop().create_future()
        return self._futures[name]

    async def listen(self) -> None:
        """Resolve the futures of requests as replies arrive."""
        while True:
            try:
                name, tokens = msgpack.unpackb(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                await asyncio.sleep(IDLE_S)
                continue
            self._futures.pop(name).set_result(tokens)


async def client(url: str, requests: int, rate: float) -> None:
    """Run the client."""
    made = Client(url)
    listening = asyncio.create_task(made.listen())

    async def ask(prompts: Sequence[bytes]) -> list[bytes]:
        asked = [made.submit(list(struct.unpack(f"<{len(one) // 4}i", one))) for one in prompts]
        got = await asyncio.wait_for(asyncio.gather(*asked), load.WAIT_S)
        return [struct.pack(f"<{len(one)}i", *one) for one in got]

    await load.measure_async(requests, rate, ask)
    listening.cancel()


if __name__ == "__main__":
    if sys.argv[1] == "coordinator":
        coordinator(sys.argv[2])
    elif sys.argv[1] == "worker":
        worker(sys.argv[2])
    else:
        asyncio.run(client(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
