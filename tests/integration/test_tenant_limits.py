"""The leader obeys the limits of tenants, also for requests that came by a plain XADD."""

from __future__ import annotations

import msgspec
import pytest

from tests.integration.operating import Opened
from tests.support.builders import make_request
from tests.support.lanes import requests
from tests.support.tenants import TenantYard
from tests.support.waiting import eventually
from tokenyard.protocol.errors import Code
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.protocol.worker_info import ServingInfo
from tokenyard.scripts.answers import Submitted


@pytest.fixture
def lanes(opened: Opened) -> TenantYard:
    return opened(TenantYard)


def ask(name: str, tenant: str = "acme", model: str = "sim") -> Request:
    params = SamplingParams(max_tokens=20)
    return make_request(name, tenant=tenant, tokens=range(10), params=params, model=model)


def test_plain_entries_beyond_a_limit_are_refused(lanes: TenantYard) -> None:
    # Given a tenant with room for two in a minute, and no workers
    lanes.set("acme", tokens_per_minute=60)
    lanes.coordinator()
    # If it writes four by XADD, and somebody else some,
    lanes.push([ask(f"q{number}") for number in range(4)])
    lanes.push(requests(3))
    # I expect the last two to be refused with the limit and the time to come back,
    for name in ("q2", "q3"):
        refused = lanes.result(name)
        assert refused.status == "failed"
        error = msgspec.json.decode(refused.error)
        assert error["code"] == Code.QUOTA_EXCEEDED
        assert error["message"].startswith("tokens_per_minute: ")
        # which their answers outlive by seconds only, so that their ids may come again,
        assert 0 < lanes.connection.ttl(lanes.keys.ledger("anon", name)) <= 66
    # and the others to wait.
    eventually(lambda: lanes.connection.xlen(lanes.keys.intake("normal:acme")) == 2)
    assert lanes.connection.xlen(lanes.keys.intake("normal")) == 3


def test_plain_entries_beyond_the_yards_bound_are_refused(lanes: TenantYard) -> None:
    lanes.coordinator(max_num_queued_reqs=10, max_normal_share=1.0)
    lanes.push([ask(f"q{number}") for number in range(8)])
    refused = lanes.result("q7")
    assert msgspec.json.decode(refused.error)["code"] == Code.QUEUE_FULL
    eventually(lambda: lanes.waiting() == 0)
    assert lanes.connection.xlen(lanes.keys.intake("normal:acme")) == 5


@pytest.mark.parametrize("models", [["sim"], ["sim", "other"]])
def test_no_more_run_than_a_tenant_may(lanes: TenantYard, models: list[str]) -> None:
    """Also where it asks for several models, whose lanes are filled one after the other."""
    lanes.set("acme", max_running_requests=3)
    workers = [lanes.worker(model, model=model) for model in models]
    flood = [ask(f"q{number}", model=models[number % len(models)]) for number in range(12)]
    [*answers] = lanes.scripts.submit("normal", flood)
    assert {answer.code for answer in answers} == {Submitted.ACCEPTED}
    lanes.scripts.submit("normal", [ask(f"o{number}", "other") for number in range(5)])
    lanes.coordinator()

    def running() -> int:
        names = [name for worker in workers for name in lanes.ids(worker)]
        return sum(name.startswith("q") for name in names)

    # I expect exactly three of it to run, and all of the other tenant.
    eventually(lambda: sum(map(lanes.load, workers)) == 3 + 5)
    assert running() == 3
    # As they end, the rest follows, and there are never more.
    for _ in range(12):
        worker = next(one for one in workers if any(n.startswith("q") for n in lanes.ids(one)))
        before = lanes.connection.xlen(lanes.keys.intake("normal:acme"))
        while lanes.lane(worker)[0].request.id.startswith("o"):
            lanes.end(worker, lanes.lane(worker)[0], output=3)
        lanes.end(worker, lanes.lane(worker)[0], output=3)
        left = max(0, before - 1)
        eventually(
            lambda left=left: lanes.connection.xlen(lanes.keys.intake("normal:acme")) == left
        )
        assert running() <= 3
        if not running():
            break
    assert lanes.connection.hget(lanes.keys.tenant("acme"), "running") == b"0"


def test_a_raised_limit_counts_at_once(lanes: TenantYard) -> None:
    lanes.set("acme", max_running_requests=1)
    worker = lanes.worker()
    lanes.scripts.submit("normal", [ask(f"q{number}") for number in range(4)])
    lanes.coordinator()
    lanes.wait_for_load(worker, 1)
    lanes.set("acme", max_running_requests=3)
    lanes.wait_for_load(worker, 3)
    lanes.set("acme")
    lanes.wait_for_load(worker, 4)


def test_the_leader_tells_what_models_generate_by_default(lanes: TenantYard) -> None:
    """So a request that does not say how much it may generate is limited by what it will."""
    lanes.set("acme", max_tokens=100)
    serving = ServingInfo(path="x", sampling={"max_tokens": 200, "temperature": 0.5})
    lanes.host("plain", "long", serving=serving, adapters=["tuned"])
    lanes.worker(model="plain", controller="host")
    lanes.coordinator()
    told = {"long": {"max_tokens": 200}, "tuned": {"max_tokens": 200}}
    eventually(
        lambda: (
            msgspec.json.decode(lanes.connection.hget(lanes.keys.info, "defaults") or b"{}") == told
        )
    )
    limits = []
    for model in ("plain", "long", "tuned"):
        request = make_request(model, tenant="acme", params=SamplingParams(), model=model)
        [answer] = lanes.scripts.submit("normal", [request])
        limits.append(answer.limit)
    assert limits == ["", "max_tokens", "max_tokens"]
    # A successor whose hosts are away knows it still.
    lanes.connection.hdel(lanes.keys.hosts, "host")
    lanes.connection.delete(lanes.keys.leader)
    lanes.coordinator()
    assert msgspec.json.decode(lanes.connection.hget(lanes.keys.info, "defaults")) == told
