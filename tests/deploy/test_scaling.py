"""Workers start when requests wait, and stop when none do, as `deploy/kubernetes` tells KEDA."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.parse
import urllib.request

from tests.deploy.day import Day
from tests.deploy.launches import manifests
from tests.support.brokers import GuardedServer
from tests.support.waiting import eventually

READY_S = 30.0


def wanted(day: Day) -> int | None:
    """The replicas that KEDA's scaler `metrics-api` asks for; None where it gets an error."""
    (scaled,) = (one for one in manifests() if one["kind"] == "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "metrics-api"
    told = trigger["metadata"]
    path = urllib.parse.urlsplit(told["url"]).path
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{day.metrics_port}{path}") as answer:
            found = json.load(answer)
    except urllib.error.HTTPError:
        return None
    for name in told["valueLocation"].split("."):
        found = found[name]
    return -(-int(found) // int(told["targetValue"]))


def test_workers_scale_from_zero_and_back(guarded: GuardedServer) -> None:
    # Given a yard without a worker
    day = Day(guarded)
    with day.plant:
        day.coordinator()
        eventually(lambda: wanted(day) == 0)
        with day.client() as client:
            # If a few requests of a tenant arrive,
            handles = client.submit_many([[1, 2]] * 3, model="sim", max_tokens=600, tenant="acme")

            # I expect them to want a worker for as long as they wait;
            eventually(lambda: wanted(day) == 1)
            # a worker starts, and is wanted while it is busy,
            day.worker("w", model_name="sim")
            (worker,) = day.plant.wait_for_workers(1)
            lane = day.keys.lane(worker)
            eventually(lambda: day.plant.connection.xlen(lane) == 3, timeout_s=READY_S)
            assert wanted(day) == 1
            # and if it must leave too early, they wait again for the next one.
            day.plant.programs[-1].signal(signal.SIGTERM)
            assert day.plant.programs[-1].wait() == 0
            eventually(lambda: day.plant.connection.xlen(day.keys.intake("retry")) == 3)
            eventually(lambda: wanted(day) == 1)
            day.worker("w", model_name="sim")
            assert all(handle.result(READY_S).ok for handle in handles)
        # No request is left, so no worker is needed.
        eventually(lambda: wanted(day) == 0)
        assert day.plant.programs[-1].stop() == 0
        assert worker not in day.plant.roster()
