"""Reading the intake: how far ahead, reading again, and entries that are gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import redis

import coordinator.dispatch.intake
from coordinator.dispatch.entries import Entry
from coordinator.dispatch.intake import LOOK_AHEAD, Intake
from coordinator.routing.queued_request import QueuedRequest
from tests.support.servers import Server
from tokenyard.broker.connection import open_connection
from tokenyard.protocol.keys import IntakeClass, Keys, Yard
from tokenyard.protocol.settings import CoordinatorSettings

BATCH = 8


@pytest.fixture
def connection(broker: Server) -> Iterator[redis.Redis]:
    """A connection as the coordinator's: it reads answers in the server's own form."""
    with open_connection(broker.url, timeout_s=30.0) as connected:
        yield connected


def settings(max_held: int) -> CoordinatorSettings:
    return CoordinatorSettings(redis_url="redis://x", max_batch=BATCH, max_held=max_held)


@pytest.fixture
def intake(connection: redis.Redis, keys: Keys) -> Intake:
    return Intake(Yard(connection, keys), settings(max_held=5 * BATCH))


class IntakeYard:
    """Clients add entries, and the test reads the intake."""

    def __init__(self, connection: redis.Redis, keys: Keys, intake: Intake) -> None:
        self.connection = connection
        self.keys = keys
        self.intake = intake

    def push(self, count: int, name: IntakeClass = "normal") -> list[str]:
        pipeline = self.connection.pipeline(transaction=True)
        for at in range(count):
            pipeline.xadd(self.keys.intake(name), {"id": f"r{at}"})
        return [entry.decode() for entry in pipeline.execute()]

    def read(self, room: int = 0) -> list[Entry]:
        """Read one turn into the backlog."""
        entries, _ = self.intake.read(room, 0)
        for one in entries:
            self.intake.backlog.add(QueuedRequest(intake=one.intake, entry=one.id, id="r"))
        return entries

    def read_all(self, room: int = 0) -> list[str]:
        """Read turns until one finds nothing."""
        found: list[str] = []
        while entries := self.read(room):
            found += [one.id for one in entries]
        return found

    def backlog(self, name: IntakeClass = "normal") -> list[str]:
        return self.intake.backlog.ids(name)

    def leave(self, entries: Iterable[str], name: IntakeClass = "normal") -> None:
        """As when requests are cancelled."""
        self.connection.xdel(self.keys.intake(name), *entries)


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys, intake: Intake) -> IntakeYard:
    return IntakeYard(connection, keys, intake)


class TestAhead:
    def test_a_turn_reads_a_batch_of_each_class(self, yard: IntakeYard) -> None:
        normal, high = yard.push(20), yard.push(5, "high")

        sizes = [len(yard.read()) for _ in range(4)]

        assert sizes == [BATCH + 5, BATCH, 4, 0]
        assert (yard.backlog(), yard.backlog("high")) == (normal, high)

    def test_beyond_the_bound_only_entries_with_room_are_read(self, yard: IntakeYard) -> None:
        # Given more than the backlog may have
        yard.push(10 * BATCH)
        yard.read_all()
        assert len(yard.backlog()) == 5 * BATCH

        # If urgent requests come, I expect a few of them to be read, and no more of the others.
        yard.push(50, "high")
        yard.read_all()
        assert (len(yard.backlog()), len(yard.backlog("high"))) == (5 * BATCH, BATCH)

    def test_beyond_the_bound_each_class_is_read_as_far_as_there_is_room(
        self, yard: IntakeYard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordinator.dispatch.intake, "LOOK_AHEAD", 3)
        yard.push(10 * BATCH)
        yard.read_all()
        low = yard.push(20, "low")

        assert yard.read_all() == low[:3]
        assert len(yard.read(room=5)) == 5
        assert len(yard.read(room=100)) == 0, "as many are held as a batch has"


class TestAgain:
    def test_a_new_term_begins_with_the_first_entry(self, yard: IntakeYard) -> None:
        # Given entries that were read, some of them gone since, and new ones
        ids = yard.push(20)
        yard.read_all()
        yard.leave(ids[3:6])
        ids += yard.push(10)
        low = yard.push(2, "low")

        yard.intake.read_again()
        first = [one.id for one in yard.read()]

        # I expect pages of all that wait.
        assert first == [*ids[:3], *ids[6 : BATCH + 3], *low]
        yard.read_all()
        assert yard.backlog() == ids[:3] + ids[6:]
        assert yard.backlog("low") == low

    def test_reading_again_is_bounded(self, yard: IntakeYard) -> None:
        ids = yard.push(100)
        yard.read_all()

        yard.intake.read_again()
        yard.read_all()
        assert len(yard.backlog()) == 5 * BATCH
        assert yard.read() == [], "nothing more will be read before some leave"

        # If there is room again, I expect the next of them.
        for entry in ids[:BATCH]:
            yard.intake.backlog.remove(QueuedRequest(intake="normal", entry=entry, id="r"))
        yard.leave(ids[:BATCH])
        assert [one.id for one in yard.read()] == ids[5 * BATCH : 6 * BATCH]


class TestCompare:
    def test_what_is_not_read_yet_is_not_missed(self, yard: IntakeYard) -> None:
        ids = yard.push(20)
        yard.read()

        yard.intake.compare()

        assert yard.intake.gone() == []
        assert not yard.intake.is_auditing
        assert yard.read_all() == ids[BATCH:]

        # Nor is anything when all was read.
        yard.intake.compare()
        assert not yard.intake.is_auditing
        assert len(yard.backlog()) == 20

    def test_entries_below_those_that_were_read_are_read(self, yard: IntakeYard) -> None:
        # Given an intake that was read, deleted and created again with lower ids
        yard.push(3, "high")
        yard.push(5)
        yard.read_all()
        yard.intake.backlog.clear()
        yard.connection.delete(yard.keys.intake("normal"), yard.keys.intake("high"))
        for entry in ("5-1", "5-2"):
            yard.connection.xadd(yard.keys.intake("normal"), {"id": "r"}, id=entry)
        assert yard.read_all() == []

        # If the lengths are compared, also while others come, I expect these to be read, once.
        yard.connection.xadd(yard.keys.intake("normal"), {"id": "r"}, id="9999999999999-1")
        assert yard.read_all() == ["9999999999999-1"]
        yard.intake.compare()
        assert yard.read_all() == ["5-1", "5-2"]
        yard.intake.compare()
        assert yard.read_all() == []

    def test_reading_an_intake_again_queues_no_entry_twice(self, yard: IntakeYard) -> None:
        # Given entries that are known, and one below them
        ids = yard.push(20)
        yard.read_all()
        first = ids[0]
        yard.connection.xdel(yard.keys.intake("normal"), first)
        queued = yard.intake.backlog.get("normal", ids[5])
        yard.intake.backlog.remove(QueuedRequest(intake="normal", entry=first, id="r"))
        yard.intake.backlog.remove(QueuedRequest(intake="normal", entry=ids[1], id="r"))

        # If all is read again, I expect only that one to be queued.
        yard.intake.compare()
        assert yard.read_all() == [ids[1]]
        assert yard.intake.backlog.get("normal", ids[5]) is queued

    def test_entries_that_are_gone_are_found_page_by_page(
        self, yard: IntakeYard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given cancelled requests here and there, and whole pages of them
        monkeypatch.setattr(coordinator.dispatch.intake, "PAGE", 3)
        ids, low = yard.push(25), yard.push(2, "low")
        yard.read_all()
        gone = [ids[0], *ids[7:16], ids[24]]
        yard.leave(gone)
        yard.leave(low, "low")

        # If the backlog is compared
        yard.intake.compare()
        assert yard.intake.is_auditing
        found = []
        for _ in range(20):
            page = yard.intake.gone()
            assert len(page) < 15
            found += page
            for waiting in page:
                yard.intake.backlog.remove(waiting)

        # I expect exactly these to be found, once, while more comes and goes.
        assert sorted(one.entry for one in found) == sorted(gone + low)
        assert not yard.intake.is_auditing
        assert set(yard.backlog()) == set(ids) - set(gone)

    def test_entries_that_leave_during_an_audit_are_not_reported(self, yard: IntakeYard) -> None:
        ids = yard.push(6)
        yard.read_all()
        yard.leave(ids[:3])
        yard.intake.compare()

        yard.intake.backlog.remove(QueuedRequest(intake="normal", entry=ids[0], id="r"))
        yard.push(3)
        yard.read()

        assert [one.entry for one in yard.intake.gone()] == ids[1:3]

    def test_audits_do_not_follow_each_other_immediately(
        self, yard: IntakeYard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given one that has just ended
        ids = yard.push(6)
        yard.read_all()
        yard.leave(ids[:1])
        yard.intake.compare()
        monkeypatch.setattr(coordinator.dispatch.intake, "REST", 1e9)
        for waiting in yard.intake.gone():
            yard.intake.backlog.remove(waiting)

        # If more is cancelled, I expect it to be left for later.
        yard.leave(ids[1:2])
        yard.intake.compare()

        assert not yard.intake.is_auditing
        assert yard.backlog() == ids[1:]


def test_cancels_wake_the_leader_once(yard: IntakeYard) -> None:
    # Given a client that requests a cancel
    yard.connection.xadd(yard.keys.cancelling, {"client": "ann"})

    # I expect a read to end with it, and to say so once,
    assert not yard.intake.is_cancelling
    assert yard.intake.read(0, 60_000) == ([], [])
    assert yard.intake.is_cancelling
    # and the entry to stay until the cancel is done, without being read again.
    assert yard.connection.xlen(yard.keys.cancelling) == 1
    assert yard.intake.read(0, 0) == ([], [])
    assert not yard.intake.is_cancelling


class TestEvents:
    def add(self, yard: IntakeYard, count: int) -> list[str]:
        added = [yard.connection.xadd(yard.keys.events, {"event": "changed"}) for _ in range(count)]
        return [entry.decode() for entry in added]

    def hear(self, intake: Intake) -> list[str]:
        _, events = intake.read(0, 0)
        return [entry for entry, _ in events]

    @pytest.mark.parametrize("count", [1, LOOK_AHEAD, 3 * LOOK_AHEAD])
    def test_a_new_leader_reads_all_events_that_are_left(
        self, yard: IntakeYard, count: int
    ) -> None:
        # Given a leader that has read events, of which it may have minded none
        events = self.add(yard, count)
        self.hear(yard.intake)

        # If another takes over, I expect it to read each once, in order.
        successor = Intake(yard, settings(max_held=BATCH))
        successor.read_again()
        heard: list[str] = []
        while len(heard) < len(events):
            heard += self.hear(successor)
        assert heard == events
        assert self.hear(successor) == []

    def test_a_read_that_fails_loses_no_event(self, yard: IntakeYard) -> None:
        # Given events, and an intake that somebody has replaced
        events = self.add(yard, 3)
        yard.connection.set(yard.keys.intake("low"), "x")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            self.hear(yard.intake)

        yard.connection.delete(yard.keys.intake("low"))
        assert self.hear(yard.intake) == events
