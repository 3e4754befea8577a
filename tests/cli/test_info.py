"""`tokenyard info`, and its view of a yard."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import redis
from click.testing import Result

from tests.support.builders import make_request, worker_json
from tests.support.waiting import eventually
from tokenyard.admin.snapshot import read_yard
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

LEASE_MS = 60_000


def test_view_of_an_empty_yard_has_no_leader(connection: redis.Redis, keys: Keys) -> None:
    view = read_yard(connection, keys)
    assert view.leader is None
    assert view.workers == []
    assert view.waiting == {"retry": 0, "high": 0, "normal": 0, "low": 0}
    assert view.models == {}


def test_view_has_leader_queues_and_dead_letters(
    connection: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    scripts.lead("north", LEASE_MS)
    scripts.submit("high", [make_request(), make_request()])
    connection.xadd(keys.dead, {"reason": "no id"})
    view = read_yard(connection, keys)
    assert view.leader
    assert (view.leader.name, view.leader.epoch) == ("north", 1)
    assert 0 < view.leader.lease_ms <= LEASE_MS
    assert (view.waiting["high"], view.waiting["normal"], view.dead) == (2, 0, 1)


def test_view_has_workers_with_lanes_and_leases(
    connection: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    worker = scripts.register("gpu", LEASE_MS, worker_json("gpu"))
    connection.xadd(keys.lane(worker), {"id": "q"})
    [seen] = read_yard(connection, keys).workers
    assert (seen.worker, seen.state, seen.lane) == (worker, "ready", 1)
    assert 0 < seen.lease_ms <= LEASE_MS
    assert read_yard(connection, keys).models == {"adder": 1}


def test_view_tells_lost_left_and_unreadable_workers_apart(
    connection: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    draining = scripts.register("a", LEASE_MS, worker_json("a", state="draining"))
    expired = scripts.register("b", 1, worker_json("b"))
    left = scripts.register("c", LEASE_MS, worker_json("c"))
    connection.zadd(keys.leases, {left: -1})
    odd = scripts.register("d", LEASE_MS, b"{broken")

    def states() -> dict[str, str]:
        seen = {each.worker: each.state for each in read_yard(connection, keys).workers}
        return seen if seen[expired] == "lost" else {}

    assert eventually(states) == {
        draining: "draining",
        expired: "lost",
        left: "left",
        odd: "unreadable",
    }
    assert read_yard(connection, keys).ready_workers == 0


def test_view_is_printed_as_json(ask: Callable[..., Result], yard: dict[str, Any]) -> None:
    result = ask("info", "--json")
    assert result.exit_code == Exit.OK, result.output
    view = json.loads(result.stdout)
    assert view["yard"] == "main"
    assert view["models"] == {"simulated": 2}
    assert {worker["state"] for worker in view["workers"]} == {"ready"}
    assert view["handshake"]["protocol"] == "1"


def test_the_table_names_every_worker(ask: Callable[..., Result]) -> None:
    workers = [each["worker"] for each in json.loads(ask("info", "--json").stdout)["workers"]]
    table = ask("info").stdout
    assert all(worker in table for worker in workers)
    assert "simulated (2 workers)" in table


def test_a_yard_without_a_leader_sets_the_exit_status(ask: Callable[..., Result]) -> None:
    result = ask("--yard", "nobody-here", "info")
    assert result.exit_code == Exit.UNAVAILABLE
    assert "none: nothing is dispatched" in result.stdout
