"""How a bridge introduces its engine, with real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from gateway.bridge import engine_core
from tests.support.front_end import FrontEnd


async def meet_one_that_dies() -> int:
    """Say HELLO to a front end that dies before it has heard it; its port."""
    with socket.create_server(("127.0.0.1", 0)) as dying:
        port: int = dying.getsockname()[1]
        meeting = asyncio.create_task(engine_core.meet(f"tcp://127.0.0.1:{port}"))
        taken, _ = await asyncio.to_thread(dying.accept)
        taken.close()
        with pytest.raises(engine_core.FrontGone):
            await meeting
    return port


def test_what_a_dead_front_end_has_not_heard_is_not_said_to_the_next() -> None:
    async def follow() -> list[bytes]:
        port = await meet_one_that_dies()
        # Given a peer that tries to reach the port, and again later than any other
        with zmq.Context() as context, context.socket(zmq.DEALER) as later:
            later.linger, later.identity, later.reconnect_ivl = 0, b"later", 1_000
            events = later.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
            later.connect(f"tcp://127.0.0.1:{port}")
            later.send(b"")
            await asyncio.to_thread(recv_monitor_message, events)
            later.disable_monitor()
            events.close(0)
            # If a front end listens there now
            with FrontEnd(port) as next_one:
                return await asyncio.to_thread(next_one.hear)

    # I expect it to hear of that peer, and of no engine before.
    assert asyncio.run(follow()) == [b"later", b""]


def test_an_engine_that_was_met_is_ready() -> None:
    async def meet(front: FrontEnd) -> engine_core.Addresses:
        greeting = threading.Thread(target=front.greet)
        greeting.start()
        found = await engine_core.meet(front.address)
        await asyncio.to_thread(greeting.join)
        return found

    with FrontEnd() as front:
        found = asyncio.run(meet(front))
    assert len(found.inputs) == len(found.outputs) == 1
    assert not found.is_python
