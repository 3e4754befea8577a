"""A yard without workers serves what its hosts have listed, once one comes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.gateway.stand import MODELS, Door, Stand
from tests.support.processes import Plant
from tests.support.waiting import eventually
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, ServingInfo

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_a_request_at_zero_workers_waits_and_is_answered_when_a_worker_comes(stand: Stand) -> None:
    with Plant(stand.plant.url) as plant, ThreadPoolExecutor() as threads:
        # Given a yard whose last host has stopped, a coordinator and a gateway that never saw it
        listed = ModelInfo(name="adder", serving=ServingInfo(path=str(MODELS / "adder")))
        plant.scripts.publish_host(HostInfo(name="w", models=[listed], left_ms=1))
        plant.coordinator()
        door = Door(plant, {"adder"})
        door.wait()
        assert httpx.get(f"{door.url}/v1/models/adder").json()["state"] == "cold"

        # If a request comes, and then a worker
        body = {"model": "adder", "prompt": "1+2=", "max_tokens": 3}
        asked = threads.submit(httpx.post, f"{door.url}/v1/completions", json=body, timeout=300.0)
        waits = plant.keys.intake("normal")
        eventually(lambda: plant.connection.xlen(waits) == 1)
        assert not asked.done()
        plant.worker(model_name="adder")

        answer = asked.result(300.0)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        unknown = httpx.post(f"{door.url}/v1/completions", json=body | {"model": "nobody's"})
        assert unknown.status_code == 404
