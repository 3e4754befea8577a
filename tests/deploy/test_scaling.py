"""Workers start when requests wait, and stop when none do, as `deploy/kubernetes` tells KEDA."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import redis

from tests.deploy.day import Day
from tests.deploy.launches import manifests
from tests.support.brokers import GuardedServer
from tests.support.waiting import eventually

READY_S = 30.0


def waiting(day: Day) -> Mapping[str, int]:
    """The length that KEDA reads for each trigger, with its user's rights."""
    (scaled,) = (one for one in manifests() if one["kind"] == "ScaledObject")
    triggers = scaled["spec"]["triggers"]
    with redis.Redis.from_url(day.url("scaler")) as connection:
        return {
            one["name"]: connection.xlen(one["metadata"]["stream"].replace("main", day.keys.yard))
            for one in triggers
        }


def test_workers_scale_from_zero_and_back(guarded: GuardedServer) -> None:
    # Given a yard without a worker
    day = Day(guarded)
    with day.plant:
        day.coordinator()
        assert set(waiting(day).values()) == {0}
        with day.client() as client:
            # If a few requests arrive,
            handles = [client.submit([1, 2], model="sim", max_tokens=600) for _ in range(3)]

            # I expect them to be visible for as long as they wait;
            assert waiting(day)["normal"] == 3
            # a worker starts,
            day.worker("w", model_name="sim")
            (worker,) = day.plant.wait_for_workers(1)
            eventually(lambda: set(waiting(day).values()) == {0}, timeout_s=READY_S)
            # and if it must leave too early, they wait again for the next one.
            day.plant.programs[-1].signal(signal.SIGTERM)
            assert day.plant.programs[-1].wait() == 0
            eventually(lambda: waiting(day)["retry"] == 3)
            day.worker("w", model_name="sim")
            assert all(handle.result(READY_S).ok for handle in handles)
        # No request waits, so no worker is needed.
        assert set(waiting(day).values()) == {0}
        assert day.plant.programs[-1].stop() == 0
        assert worker not in day.plant.roster()
