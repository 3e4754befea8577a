"""The reader of a lane, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import redis

from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.protocol.wire import Assignment
from tokenyard.protocol.yard import Yard
from worker.process.lane_session import LaneReader


@pytest.fixture
def delivered() -> list[Assignment]:
    return []


@pytest.fixture
def cancelled() -> list[str]:
    return []


@pytest.fixture
def reader(
    yard: PlayedYard, broker: Server, delivered: list[Assignment], cancelled: list[str]
) -> Iterator[LaneReader]:
    with redis.Redis.from_url(broker.url, socket_timeout=30.0) as own:
        reader = LaneReader(
            Yard(own, yard.keys),
            yard.worker(),
            delivered.extend,
            lambda entry, charged: cancelled.append(f"{entry} {charged}"),
            block_ms=100,
        )
        yield reader
        reader.stop()
        reader._thread.join(30.0)


def test_each_assignment_comes_once_and_in_order(
    yard: PlayedYard, reader: LaneReader, delivered: list[Assignment]
) -> None:
    worker = reader._stream.rpartition(":")[2]
    placed = [yard.assign(worker) for _ in range(3)]
    reader.start()
    eventually(lambda: delivered == placed)
    placed += [yard.assign(worker) for _ in range(3)]

    eventually(lambda: delivered == placed)
    assert len(yard.lane(worker)) == 6, "they stay until their results are published"


def test_forged_entries_are_removed(
    yard: PlayedYard, reader: LaneReader, delivered: list[Assignment]
) -> None:
    for fields in (
        {"x": "y"},
        {"id": "a", "prompt": "p"},
        {"id": "a", "prompt": "p", "attempt": "abc", "sid": "normal/1-0"},
        {"id": "a", "prompt": "p", "attempt": "1"},
        {"id": "a", "prompt": "p", "attempt": "1", "sid": "normal/1-0", "published": "abc"},
    ):
        yard.connection.xadd(reader._stream, fields)
    reader.start()

    eventually(lambda: not yard.connection.xlen(reader._stream))
    assert delivered == []


def test_cancels_are_passed_on_and_taken_off_the_lane(
    yard: PlayedYard, reader: LaneReader, cancelled: list[str]
) -> None:
    yard.connection.xadd(reader._stream, {"cancel": "7-0"})
    yard.connection.xadd(reader._stream, {"cancel": "8-0", "request": "ann/q/1"})
    reader.start()

    eventually(lambda: not yard.connection.xlen(reader._stream))
    assert cancelled == ["7-0 ", "8-0 ann/q/1"]


def test_the_lane_is_read_again_after_an_outage(
    yard: PlayedYard, reader: LaneReader, delivered: list[Assignment]
) -> None:
    # Given an entry that was read, and is before the reader's position
    worker = reader._stream.rpartition(":")[2]
    reader.start()
    first, second = yard.assign(worker), yard.assign(worker)
    eventually(lambda: delivered == [first, second])
    yard.connection.xdel(reader._stream, second.entry)

    # If the reader's connection is killed
    yard.connection.client_kill_filter(_type="normal", skipme=True)

    # I expect the entry to come again, and then the new ones.
    eventually(lambda: delivered == [first, second, first])
    third = yard.assign(worker)
    eventually(lambda: delivered == [first, second, first, third])


def test_nothing_is_delivered_after_a_stop(
    yard: PlayedYard, reader: LaneReader, delivered: list[Assignment]
) -> None:
    worker = reader._stream.rpartition(":")[2]
    reader.start()
    reader.stop()
    yard.assign(worker)

    reader._thread.join(30.0)

    assert delivered == []


def test_a_cancel_comes_after_its_request(yard: PlayedYard, broker: Server) -> None:
    """Given a request and its cancel, if one read returns both, I expect that order."""
    heard: list[str] = []
    worker = yard.worker()
    assigned = yard.assign(worker)
    yard.connection.xadd(yard.keys.lane(worker), {"cancel": assigned.entry})
    later = yard.assign(worker)
    with redis.Redis.from_url(broker.url, socket_timeout=30.0) as own:
        reader = LaneReader(
            Yard(own, yard.keys),
            worker,
            lambda found: heard.extend(each.entry for each in found),
            lambda entry, _: heard.append(f"cancel {entry}"),
            block_ms=100,
        )
        reader.run_once()

    assert heard == [assigned.entry, f"cancel {assigned.entry}", later.entry]


def test_the_first_entry_of_a_long_read_does_not_wait_for_the_last(
    yard: PlayedYard, broker: Server
) -> None:
    parts: list[Sequence[Assignment]] = []
    worker = yard.worker()
    placed = [yard.assign(worker) for _ in range(100)]
    with redis.Redis.from_url(broker.url, socket_timeout=30.0) as own:
        LaneReader(
            Yard(own, yard.keys), worker, parts.append, lambda *_: None, block_ms=100
        ).run_once()

    assert [each for part in parts for each in part] == placed
    assert 2 <= len(parts) <= 10


def test_entries_before_a_fault_are_delivered_once(yard: PlayedYard, broker: Server) -> None:
    """Given a forged entry after a request, if it cannot be removed, I expect the request."""
    delivered: list[Assignment] = []
    worker = yard.worker()
    assigned = yard.assign(worker)
    yard.connection.xadd(yard.keys.lane(worker), {"x": "y"})
    with redis.Redis.from_url(broker.url, socket_timeout=30.0) as own:
        reader = LaneReader(
            Yard(own, yard.keys), worker, delivered.extend, lambda *_: None, block_ms=100
        )
        broken = mock.patch.object(own, "xdel", side_effect=redis.ConnectionError("gone"))
        with broken, pytest.raises(redis.ConnectionError):
            reader.run_once()
        assert delivered == [assigned]
        reader.run_once()

    assert delivered == [assigned]
    assert len(yard.lane(worker)) == 1
