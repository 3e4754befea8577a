"""`/scale`: what waits and runs, and how many workers that needs, as an autoscaler reads it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.integration.operating import Opened
from tests.support.builders import make_request
from tests.support.lanes import Lanes
from tests.support.servers import free_port
from tests.support.waiting import eventually
from tokenyard.protocol import leader_reports
from tokenyard.protocol.leader_reports import FIELD

pytestmark = pytest.mark.valkey_only


class Yard(Lanes):
    """A yard whose coordinators have an endpoint."""

    port = 0

    def lead(self, **values: Any) -> None:
        self.port = free_port()
        self.coordinator(metrics_host="127.0.0.1", metrics_port=self.port, **values)

    def submit(self, count: int, **fields: Any) -> None:
        self.scripts.submit("normal", [make_request(**fields) for _ in range(count)])

    def scale(self, query: str = "") -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/scale{query}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    def says(self, **expected: Any) -> bool:
        """Wait until it says this of all models together."""

        def matches() -> bool:
            try:
                told = self.scale()
            except urllib.error.HTTPError:  # it has not said anything yet
                return False
            return told == told | expected

        return eventually(matches)


@pytest.fixture
def yard(opened: Opened) -> Yard:
    return opened(Yard)


def test_requests_of_tenants_count_where_there_is_no_worker(yard: Yard) -> None:
    yard.host("sim", "other")
    yard.lead()

    yard.submit(65, model="sim", tenant="acme")

    wanted = {"model": "sim", "waiting": 65, "running": 0, "workers": 2}
    assert yard.says(waiting=65, running=0, workers=2)
    assert eventually(lambda: yard.scale("?model=sim") == wanted)
    assert yard.scale("?model=other")["workers"] == 0
    assert yard.scale("?model=unknown")["workers"] == 0


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_what_the_leader_has_not_read_yet_counts(yard: Yard, tenant: str) -> None:
    yard.host("sim")
    yard.lead(max_batch=8, max_held=8)

    yard.submit(100, model="sim", tenant=tenant)

    assert yard.says(waiting=100)
    assert yard.scale()["models"][""]["waiting"] > 0


def test_workers_that_are_busy_or_pinned_are_wanted(yard: Yard) -> None:
    # Given two workers with room for many more, and a request on each
    workers = [yard.worker(name, lane_limit=10) for name in ("v", "w")]
    yard.lead()
    yard.submit(2, model="sim")
    for worker in workers:
        yard.wait_for_load(worker, 1)

    # I expect both to be needed until these are answered,
    assert yard.says(waiting=0, running=2, workers=2)
    for worker in workers:
        yard.finish(worker, *yard.lane(worker))
    assert yard.says(running=0, workers=0)
    # and a pinned model to need its workers always.
    yard.host("sim", pin=3)
    assert yard.says(waiting=0, running=0, workers=3)


def test_no_leader_is_no_zero(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    yard.lead()
    assert yard.says(waiting=0)

    # What a leader said that has gone since
    monkeypatch.setattr(leader_reports, "FRESH_MS", -1)
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        yard.scale()
    assert "no coordinator leads" in caught.value.read().decode()

    monkeypatch.undo()
    yard.connection.hset(yard.keys.info, FIELD, "{")
    assert yard.says(waiting=0), "the leader says it again"
