"""The reader of a lane, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import redis

from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.wire import Assignment
from worker.process.lane_session import LaneReader


class Rig:
    """The reader of a lane, and what it passes on."""

    def __init__(self, yard: PlayedYard, connection: redis.Redis) -> None:
        self.connection = connection
        self.worker = yard.worker()
        self.lane = yard.keys.lane(self.worker)
        self.parts: list[Sequence[Assignment]] = []
        self.heard: list[Assignment | str] = []
        self.reader = LaneReader(
            Yard(connection, yard.keys), self.worker, self._deliver, self._cancel, block_ms=100
        )

    def _deliver(self, part: Sequence[Assignment]) -> None:
        self.parts.append(part)
        self.heard += part

    def _cancel(self, entry: str, charged: str) -> None:
        self.heard.append(f"cancel {entry} {charged}")


@pytest.fixture
def rig(yard: PlayedYard, broker: Server) -> Iterator[Rig]:
    with redis.Redis.from_url(broker.url, socket_timeout=30.0) as own:
        made = Rig(yard, own)
        yield made
        made.reader.stop()
        if made.reader._thread.is_alive():
            made.reader._thread.join(30.0)


def test_each_assignment_comes_once_and_in_order(yard: PlayedYard, rig: Rig) -> None:
    placed = [yard.assign(rig.worker) for _ in range(3)]
    rig.reader.start()
    eventually(lambda: rig.heard == placed)
    placed += [yard.assign(rig.worker) for _ in range(3)]

    eventually(lambda: rig.heard == placed)
    assert len(yard.lane(rig.worker)) == 6, "they stay until their results are published"


def test_forged_entries_are_removed(yard: PlayedYard, rig: Rig) -> None:
    for fields in (
        {"x": "y"},
        {"id": "a", "prompt": "p"},
        {"id": "a", "prompt": "p", "attempt": "abc", "sid": "normal/1-0"},
        {"id": "a", "prompt": "p", "attempt": "1"},
        {"id": "a", "prompt": "p", "attempt": "1", "sid": "normal/1-0", "published": "abc"},
    ):
        yard.connection.xadd(rig.lane, fields)
    rig.reader.start()

    eventually(lambda: not yard.connection.xlen(rig.lane))
    assert rig.heard == []


def test_cancels_are_passed_on_and_taken_off_the_lane(yard: PlayedYard, rig: Rig) -> None:
    yard.connection.xadd(rig.lane, {"cancel": "7-0"})
    yard.connection.xadd(rig.lane, {"cancel": "8-0", "request": "ann/q/1"})
    rig.reader.start()

    eventually(lambda: not yard.connection.xlen(rig.lane))
    assert rig.heard == ["cancel 7-0 ", "cancel 8-0 ann/q/1"]


def test_the_lane_is_read_again_after_an_outage(yard: PlayedYard, rig: Rig) -> None:
    # Given an entry that was read, and is before the reader's position
    rig.reader.start()
    first, second = yard.assign(rig.worker), yard.assign(rig.worker)
    eventually(lambda: rig.heard == [first, second])
    yard.connection.xdel(rig.lane, second.entry)

    # If the reader's connection is killed
    yard.connection.client_kill_filter(_type="normal", skipme=True)

    # I expect the entry to come again, and then the new ones.
    eventually(lambda: rig.heard == [first, second, first])
    third = yard.assign(rig.worker)
    eventually(lambda: rig.heard == [first, second, first, third])


def test_a_cancel_comes_after_its_request(yard: PlayedYard, rig: Rig) -> None:
    """Given a request and its cancel, if one read returns both, I expect that order."""
    assigned = yard.assign(rig.worker)
    yard.connection.xadd(rig.lane, {"cancel": assigned.entry})
    later = yard.assign(rig.worker)

    rig.reader.run_once()

    assert rig.heard == [assigned, f"cancel {assigned.entry} ", later]


def test_the_first_entry_of_a_long_read_does_not_wait_for_the_last(
    yard: PlayedYard, rig: Rig
) -> None:
    placed = [yard.assign(rig.worker) for _ in range(100)]

    rig.reader.run_once()

    assert rig.heard == placed
    assert 2 <= len(rig.parts) <= 10


def test_entries_before_a_fault_are_delivered_once(yard: PlayedYard, rig: Rig) -> None:
    """Given a forged entry after a request, if it cannot be removed, I expect the request."""
    assigned = yard.assign(rig.worker)
    yard.connection.xadd(rig.lane, {"x": "y"})
    broken = mock.patch.object(rig.connection, "xdel", side_effect=redis.ConnectionError("gone"))
    with broken, pytest.raises(redis.ConnectionError):
        rig.reader.run_once()
    assert rig.heard == [assigned]
    rig.reader.run_once()

    assert rig.heard == [assigned]
    assert len(yard.lane(rig.worker)) == 1
