"""Streams that scripts write are trimmed: roughly, as Redis does it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.builders import framed, worker_json
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.protocol.control import Command, DesiredState, Order, encode_desired
from tokenyard.scripts import Scripts
from tokenyard.scripts.client import request_cancel

LOAD = Command(verb="load", worker="w.1", model="adder")


def bury(yard: PlayedYard, _: int) -> None:
    scripts = Scripts(yard, dead_maxlen=100)
    scripts.bury(yard.token, "normal", yard.push({"prompt": "x"}).entry, "x")


def answer(yard: PlayedYard, _: int) -> None:
    yard.scripts._reply_maxlen = 100
    yard.answer(yard.submit(framed(client="ann")))


def signal(yard: PlayedYard, at: int) -> None:
    seen = encode_desired(DesiredState(epoch=at - 1)) if at else b""
    order = Order(signal="SET_GENERATION_EPOCH", epoch=at)
    assert yard.scripts.signal(order, seen, DesiredState(epoch=at))


def record(yard: PlayedYard, _: int) -> None:
    yard.scripts.record(yard.token, {"finished": 1}, 400)


def command(yard: PlayedYard, _: int) -> None:
    yard.scripts.command(LOAD, yard.token)


def join(yard: PlayedYard, _: int) -> None:
    yard.scripts.register("w", LONG_MS, b"{}")


def change(yard: PlayedYard, at: int) -> None:
    yard.scripts.renew(LONG_MS, [("w.1", worker_json(pid=at))])


def cancel(yard: PlayedYard, at: int) -> None:
    yard.scripts.call(request_cancel(yard.keys, "ann", f"{at}"))


@pytest.mark.parametrize(
    ("write", "stream", "least", "most"),
    [
        (bury, "dead", 100, 300),
        (answer, "replies", 100, 300),
        (record, "history", 400, 500),
        (command, "control", 1000, 1200),
        (signal, "control", 1000, 1200),
        (signal, "events", 1000, 1200),
        (join, "events", 1000, 1200),
        (change, "events", 1000, 1200),
        (cancel, "cancelling", 1000, 1200),
    ],
)
def test_a_stream_is_bounded(
    yard: PlayedYard,
    worker: str,
    write: Callable[[PlayedYard, int], object],
    stream: str,
    least: int,
    most: int,
) -> None:
    for at in range(most + 300):
        write(yard, at)

    key = yard.keys.replies("ann") if stream == "replies" else getattr(yard.keys, stream)
    assert least <= yard.connection.xlen(key) <= most
