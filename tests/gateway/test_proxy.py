"""A gateway whose way to the broker fails in each way serves again once it is well."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.stand import MODELS, Door, Stand
from tests.support.processes import Plant
from tests.support.proxy import FAULTS, Fault, Proxy
from tests.support.waiting import eventually
from tokenyard import clock
from tokenyard.protocol.worker_info import ServingInfo

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

#: How long a fault is met at the latest: the listeners block for some seconds.
MET_S: Final = 60.0
TIMES: Final = 50
#: In which it should serve again: half of the times, and each time. A busy machine is slower.
WANTED_S: Final = 5.0
MOST_S: Final = 15.0
#: How long each fault lasts once; the others are shorter.
LONGEST_S: Final = 60.0


@dataclass
class Behind:
    """A yard, and a gateway behind a proxy."""

    plant: Plant
    proxy: Proxy
    door: Door
    ends: Counter[str]  # how the streams ended that an outage met

    def ask(self, *, stream: bool) -> str:
        """How a request ends: done, failed (after it began) or refused."""
        body = {"model": "adder", "prompt": "1+2=", "max_tokens": 50, "stream": stream}
        answer = httpx.post(f"{self.door.url}/v1/completions", json=body, timeout=120.0)
        if answer.status_code != 200:
            assert answer.status_code in (502, 503, 504), answer.text
            return "refused"
        if '"error"' in answer.text:
            return "failed"
        assert not stream or answer.text.rstrip().endswith("data: [DONE]"), answer.text
        return "done"

    def serves(self) -> bool:
        try:
            return self.ask(stream=False) == "done"
        except httpx.TransportError:
            return False

    def survive(self, fault: Fault, seconds: float) -> float:
        """Fail so for some time while it streams; the time until it serves again."""
        with ThreadPoolExecutor() as threads:
            streams = [threads.submit(self.ask, stream=True) for _ in range(3)]
            self.proxy.fail(fault)
            assert self.proxy.wait_for_hit(MET_S), fault
            if fault == "refuse":  # connections that were refused cannot be seen from outside
                assert self.ask(stream=False) == "refused"
            threading.Event().wait(seconds)
            self.proxy.heal()
            began = clock.monotonic()
            eventually(self.serves, timeout_s=60.0)
            took_s = clock.monotonic() - began
            self.ends.update(one.result(120.0) for one in streams)
        assert httpx.get(f"{self.door.url}/livez", timeout=60.0).status_code == 200
        assert self.door.program.is_running
        return took_s


@pytest.fixture
def behind(stand: Stand) -> Iterator[Behind]:
    with Plant(stand.plant.url) as plant:
        proxy = Proxy(urlsplit(plant.url).port or 0)
        plant.coordinator()
        serving = ServingInfo(path=str(MODELS / "adder"))
        plant.worker(model_name="adder", simulated_step_s=0.02)
        plant.wait_for_workers(1)
        door = Door(
            plant,
            {"adder"},
            redis_url=f"redis://127.0.0.1:{proxy.port}",
            model_paths=f"adder={serving.path}",
        )
        door.wait()
        found = Behind(plant, proxy, door, Counter())
        assert found.serves()
        try:
            yield found
        finally:
            proxy.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gateway_serves_again(behind: Behind, fault: Fault) -> None:
    behind.survive(fault, 0.0)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_outages(
    behind: Behind, record_testsuite_property: Callable[[str, object], None]
) -> None:
    luck = random.Random(1)
    took: list[tuple[float, Fault, float]] = []
    plan = [(fault, LONGEST_S) for fault in FAULTS]
    while len(plan) < TIMES:
        plan.append((luck.choice(FAULTS), min(LONGEST_S, 1.0 + luck.expovariate(1 / 6))))
    for fault, seconds in plan:
        took.append((behind.survive(fault, seconds), fault, seconds))

    took.sort()
    told = "\n".join(f"{one:.2f} s after {fault} for {s:.1f} s" for one, fault, s in took)
    record_testsuite_property("serves again", told)
    record_testsuite_property("ends of streams", dict(behind.ends))
    assert took[TIMES // 2][0] < WANTED_S, told
    assert took[-1][0] < MOST_S, told
    assert behind.ends["done"], behind.ends
