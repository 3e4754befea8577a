"""The workers of a host in the yard: joining, renewing leases, leaving, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.support.builders import make_worker_info
from tests.support.waiting import eventually
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.protocol.worker_info import (
    HostInfo,
    ModelInfo,
    WorkerInfo,
    WorkerTotals,
    decode_host,
    decode_worker,
)
from worker.host.membership import Membership

HOST = HostInfo(name="host", models=[ModelInfo(name="adder")])


class Members:
    """A membership, with its reports recorded."""

    def __init__(self, yard: PlayedYard, lease_ms: int = LONG_MS) -> None:
        self.yard = yard
        self.lost: list[str] = []
        self.membership = Membership(yard.scripts, lease_ms, self.lost.append)

    def roster(self) -> dict[str, WorkerInfo]:
        entries = self.yard.connection.hgetall(self.yard.keys.workers)
        return {worker.decode(): decode_worker(packed) for worker, packed in entries.items()}

    def hosts(self) -> list[HostInfo]:
        entries = self.yard.connection.hgetall(self.yard.keys.hosts)
        return [decode_host(packed) for packed in entries.values()]


@pytest.fixture
def members(yard: PlayedYard) -> Iterator[Members]:
    made = Members(yard)
    yield made
    made.membership.stop()


def test_workers_join_and_leave(members: Members) -> None:
    entry = make_worker_info("w")
    worker = members.membership.join(entry)
    assert members.roster() == {worker: msgspec.structs.replace(entry, lease_ms=LONG_MS)}

    members.membership.leave(worker, "left")
    members.membership.show(worker, entry)
    members.membership.renew()

    assert members.roster() == {}, "it is not shown again"
    assert members.lost == [], "it went by itself"


def test_a_shown_entry_is_visible_immediately(members: Members) -> None:
    # Given leases so long that the next renewal is minutes away
    members.membership.start()
    worker = members.membership.join(make_worker_info("w", state="warming"))

    members.membership.show(worker, make_worker_info("w", state="warm"))

    eventually(lambda: members.roster()[worker].state == "warm")


@pytest.mark.long
def test_counts_are_visible_soon_and_wake_no_reader(members: Members) -> None:
    # Given leases so long that the next renewal is minutes away
    members.membership.start()
    worker = members.membership.join(make_worker_info("w"))
    before = members.yard.events()

    members.membership.count(worker, WorkerTotals(finished=3, tokens=70), "out of luck", 17)

    eventually(lambda: members.roster()[worker].tally == WorkerTotals(finished=3, tokens=70))
    seen = members.roster()[worker]
    assert (seen.last_error, seen.last_error_ms) == ("out of luck", 17)
    # I expect an error to be news, and a count not
    assert len(members.yard.events()) == len(before) + 1
    members.membership.count(worker, WorkerTotals(finished=4, tokens=80), "out of luck", 17)
    eventually(lambda: members.roster()[worker].tally.finished == 4)
    assert len(members.yard.events()) == len(before) + 1


def test_leases_are_renewed_repeatedly(members: Members) -> None:
    brief = Members(members.yard, lease_ms=300)
    brief.membership.start()
    worker = brief.membership.join(make_worker_info("w"))
    keys, connection = members.yard.keys, members.yard.connection
    first = connection.zscore(keys.leases, worker)
    assert first

    eventually(lambda: (connection.zscore(keys.leases, worker) or 0) > first + 600)

    brief.membership.stop()
    assert brief.lost == []


def test_a_lost_lease_is_reported_once(members: Members) -> None:
    lost, kept = (members.membership.join(make_worker_info(name)) for name in ("a", "b"))
    members.yard.scripts.retire(lost, "lost")

    members.membership.renew()
    members.membership.renew()

    assert members.lost == [lost]
    assert members.roster().keys() == {kept}


def test_a_host_shows_the_models_that_it_may_load(members: Members) -> None:
    members.membership.start()
    members.membership.publish(HOST)
    eventually(lambda: members.hosts() == [HOST])

    # Given that the entry was deleted, or that the server lost its files
    members.yard.connection.delete(members.yard.keys.hosts)
    members.membership.renew()
    assert members.hosts() == [HOST]

    # It stays behind, with the time: the yard still knows what it is there to serve.
    members.membership.stop()
    [left] = members.hosts()
    assert left.left_ms > 0
    assert msgspec.structs.replace(left, left_ms=0) == HOST


def test_leases_are_renewed_before_the_host_if_the_server_is_out_of_memory(
    members: Members,
) -> None:
    worker = members.membership.join(make_worker_info("w", state="warming"))
    members.membership.publish(HOST)
    members.membership.show(worker, make_worker_info("w", state="warm"))

    with members.yard.without_memory():
        members.membership.renew()

    assert members.roster()[worker].state == "warm"
