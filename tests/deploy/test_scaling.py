"""Workers come when requests wait, and go when none do, as `deploy/kubernetes` has KEDA do it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import redis

from tests.deploy.day import Day
from tests.deploy.launches import manifests
from tests.support.brokers import GuardedServer
from tests.support.waiting import eventually
from tokenyard.protocol.keys import GROUP

READY_S = 30.0


def waiting(day: Day) -> Mapping[str, int]:
    """What KEDA sees for each trigger, with the user that it has."""
    (scaled,) = (one for one in manifests() if one["kind"] == "ScaledObject")
    triggers = scaled["spec"]["triggers"]
    with redis.Redis.from_url(day.url("scaler")) as connection:
        return {
            one["name"]: connection.xlen(one["metadata"]["stream"].replace("main", day.keys.yard))
            for one in triggers
        }


def lag(day: Day) -> int:
    """What KEDA would see if it looked at the consumer group."""
    with redis.Redis.from_url(day.url("scaler")) as connection:
        found: Any = connection.xinfo_groups(day.keys.intake("normal"))
    (group,) = (one for one in found if one["name"] == GROUP.encode())
    return int(group["lag"])


def test_from_no_worker_and_back(guarded: GuardedServer) -> None:
    # Given a yard without a worker
    day = Day(guarded)
    with day.plant:
        day.coordinator()
        assert set(waiting(day).values()) == {0}
        with day.client() as client:
            # If a few requests come,
            handles = [client.submit([1, 2], model="sim", max_tokens=200) for _ in range(3)]

            # I expect that they can be seen to wait, though their group has no lag:
            assert waiting(day)["normal"] == 3
            eventually(lambda: lag(day) == 0)
            assert waiting(day)["normal"] == 3
            # with them a worker comes,
            day.worker("w", model_name="sim")
            (worker,) = day.plant.wait_for_workers(1)
            eventually(lambda: set(waiting(day).values()) == {0}, timeout_s=READY_S)
            # and where it is told to go too early, they wait again, for the next one.
            day.plant.programs[-1].signal(signal.SIGTERM)
            assert day.plant.programs[-1].wait() == 0
            eventually(lambda: waiting(day)["retry"] == 3)
            day.worker("w", model_name="sim")
            assert all(handle.result(READY_S).ok for handle in handles)
        # Nothing waits any more, so no worker is needed.
        assert set(waiting(day).values()) == {0}
        assert day.plant.programs[-1].stop() == 0
        assert worker not in day.plant.roster()
