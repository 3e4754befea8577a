"""The leader cancels requests for clients without the permission to do so."""

from __future__ import annotations

import pytest

from coordinator.recovery import cancels
from coordinator.recovery.cancels import CancelRequests
from coordinator.telemetry.counts import CoordinatorCounts
from tests.integration.operating import Opened
from tests.support.builders import make_request
from tests.support.lanes import Lanes
from tests.support.waiting import eventually
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import ALL, Order
from tokenyard.scripts.answers import Cancelled
from tokenyard.scripts.client import request_cancel


class Yard(Lanes):
    """A yard whose clients request cancels."""

    def submit(self, *names: str, client: str = "ann") -> None:
        self.scripts.submit("normal", [make_request(name, client=client) for name in names])

    def request_cancel(self, *names: str, client: str = "ann") -> None:
        for name in names:
            self.scripts.call(request_cancel(self.keys, client, name))

    def status(self, name: str, client: str = "ann") -> str:
        return self.result(name, client).status or ""

    def state(self, name: str, client: str = "ann") -> str:
        return (self.connection.hget(self.keys.ledger(client, name), "state") or b"").decode()

    def is_granted(self) -> bool:
        """Whether all requested cancels are done."""
        return not self.connection.xlen(self.keys.cancelling)


@pytest.fixture
def yard(opened: Opened) -> Yard:
    return opened(Yard)


@pytest.fixture
def looks_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the periodic read, only events of clients have an effect."""
    monkeypatch.setattr(cancels, "EVERY_S", 3_600.0)


def test_a_requested_cancel_happens_immediately(yard: Yard, looks_never: None) -> None:
    # Given a request that runs, one that waits, and one of another client
    worker = yard.worker(lane_limit=1)
    yard.coordinator()
    yard.submit("runs")
    yard.wait_for_load(worker, 1)
    yard.submit("waits")
    yard.submit("runs", "waits", client="bob")
    entry = yard.lane(worker)[0].entry

    # If a client cancel requests, I expect its requests to end,
    yard.request_cancel("runs", "waits", "later")
    assert [yard.status(name) for name in ("runs", "waits", "later")] == ["cancelled"] * 3
    # the worker to be notified,
    told = [fields for _, fields in yard.connection.xrange(yard.keys.lane(worker))]
    assert {b"cancel": entry.encode()} in told
    # others' requests to stay, and nothing to be left of the cancel.
    assert yard.state("waits", "bob") == "waiting"
    eventually(yard.is_granted)
    assert not yard.connection.exists(yard.keys.cancels("ann"))


def test_a_requested_cancel_happens_during_a_pause(yard: Yard, looks_never: None) -> None:
    yard.worker()
    yard.coordinator()
    Signals(yard).give(Order(signal="PAUSE", scope=ALL))
    yard.submit("waits")

    yard.request_cancel("waits")

    assert yard.status("waits") == "cancelled"


def test_cancels_requested_from_an_earlier_leader_are_found(yard: Yard) -> None:
    # Given a cancel that came when nobody led
    yard.coordinator().stop()
    eventually(lambda: not yard.connection.exists(yard.keys.leader))
    yard.submit("waits")
    yard.request_cancel("waits")

    # If another takes over, I expect it to be granted.
    yard.coordinator(name="second")
    assert yard.status("waits") == "cancelled"
    eventually(yard.is_granted)


def test_a_deleted_stream_is_created_again(yard: Yard) -> None:
    yard.coordinator()
    yard.connection.delete(yard.keys.cancelling)

    yard.submit("waits")
    yard.request_cancel("waits")

    assert yard.status("waits") == "cancelled"


class TestOneTurn:
    @pytest.fixture
    def granting(self, yard: Yard) -> CancelRequests:
        return CancelRequests(yard.scripts, CoordinatorCounts())

    def test_a_turn_is_bounded_and_reports_whether_there_is_more(
        self, yard: Yard, granting: CancelRequests, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cancels, "MOST_CANCELLED", 4)
        names = [f"r{n}" for n in range(6)]
        for client in ("ann", "bob"):
            yard.submit(*names, client=client)
            yard.request_cancel(*names, client=client)

        cancelled = []
        for _ in range(4):
            granting.run_once()
            states = [yard.state(name, client) for client in ("ann", "bob") for name in names]
            cancelled.append((states.count("cancelled"), granting.has_more))

        assert cancelled == [(4, True), (8, True), (12, True), (12, False)]
        assert yard.is_granted()

    def test_a_turn_reads_only_when_woken_or_due(
        self, yard: Yard, granting: CancelRequests
    ) -> None:
        granting.run_once()
        yard.submit("a")
        yard.request_cancel("a")

        granting.run_once()
        assert yard.state("a") == "waiting"

        granting.run_once(is_woken=True)
        assert yard.state("a") == "cancelled"

    def test_invalid_entries_are_deleted(self, yard: Yard, granting: CancelRequests) -> None:
        for fields in ({"x": "y"}, {"client": "no name"}, {"client": b"\xff"}, {"client": "idle"}):
            yard.connection.xadd(yard.keys.cancelling, fields)
        yard.connection.sadd(yard.keys.cancels("ann"), b"\xff")
        yard.connection.xadd(yard.keys.cancelling, {"client": "ann"})

        granting.run_once()

        assert yard.is_granted()

    def test_a_request_that_moves_all_the_time_is_tried_again(
        self, yard: Yard, granting: CancelRequests, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        yard.submit("a")
        yard.request_cancel("a")
        with monkeypatch.context() as patch:
            patch.setattr(yard.scripts, "cancel", lambda *_: Cancelled.MOVED)
            granting.run_once()
        assert (granting.has_more, yard.is_granted()) == (True, False)

        granting.run_once()

        assert yard.state("a") == "cancelled"
        assert yard.is_granted()
