"""Loops in the background: no error ends them, and one that is gone is seen."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.support.fake_clock import FakeClock
from tokenyard.broker.connection import translated
from tokenyard.broker.tasks import BackgroundLoop
from tokenyard.protocol.errors import BrokerUnavailable

log = logging.getLogger("tests")
pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("error", "fault"),
    [(RuntimeError("odd"), "counting fails: RuntimeError('odd')"), (BrokerUnavailable("away"), "")],
)
async def test_a_turn_that_fails_is_taken_again_after_bounded_pauses(
    fake_clock: FakeClock, error: Exception, fault: str
) -> None:
    faults: list[str] = []
    began = fake_clock.now
    works = asyncio.Event()

    async def turn() -> None:
        faults.append(loop.fault())
        if len(faults) <= 20:
            raise error
        if len(faults) == 22:
            works.set()
        await asyncio.sleep(0)

    loop = BackgroundLoop(turn, "counting", log)
    loop.start()
    await works.wait()
    await loop.stop()
    assert loop.fault() == ""
    assert faults[:22] == ["", *[fault] * 20, ""]
    assert 0 < fake_clock.now - began <= 20 * 2.0


async def test_a_loop_that_somebody_cancelled_is_gone() -> None:
    begun = asyncio.Event()

    async def turn() -> None:
        begun.set()
        await asyncio.Event().wait()

    loop = BackgroundLoop(turn, "counting", log)
    loop.start()
    await begun.wait()
    [task] = [one for one in asyncio.all_tasks() if one.get_name() == "counting"]
    task.cancel()
    await asyncio.wait([task])

    assert loop.fault() == "counting has ended"


def test_what_uvloop_raises_of_a_closed_connection_is_a_broker_that_is_away() -> None:
    message = "unable to perform operation on <TCPTransport closed=True>; the handler is closed"
    with pytest.raises(BrokerUnavailable), translated("redis://127.0.0.1:1"):
        raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="other"), translated("redis://127.0.0.1:1"):
        raise RuntimeError("other")
