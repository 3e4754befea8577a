"""Limits of a tenant as both clients report them."""

from __future__ import annotations

import pytest

from tests.contract.conftest import NewClient
from tests.contract.stand_in import StandIn
from tests.contract.turns import taking_turns
from tokenyard import Code, QuotaExceeded, TransientError
from tokenyard.protocol.tenants import TenantSettings, encode_tenant


def limit(yard: StandIn, **limits: object) -> None:
    yard.connection.hset(yard.keys.tenants, "acme", encode_tenant(TenantSettings(**limits)))


def test_a_limit_is_reported_with_its_name_and_when_to_come_back(
    yard: StandIn, new_client: NewClient
) -> None:
    limit(yard, max_waiting_requests=2)
    client = new_client()

    with pytest.raises(QuotaExceeded) as caught:
        client.submit_many([[1], [2], [3]], tenant="acme")

    assert isinstance(caught.value, TransientError)
    assert caught.value.limit == "max_waiting_requests"
    assert caught.value.retry_after_s > 0
    assert "max_waiting_requests" in str(caught.value)
    # What was accepted stays accepted.
    assert [handle.status().state for handle in caught.value.accepted] == ["waiting"] * 2
    client.cancel(caught.value.accepted[0].id)
    assert client.submit([3], tenant="acme").status().state == "waiting"


def test_a_request_that_is_never_admitted_says_so(yard: StandIn, new_client: NewClient) -> None:
    limit(yard, max_tokens=10)
    with pytest.raises(QuotaExceeded) as caught:
        new_client().submit([1], tenant="acme", max_tokens=11)
    assert (caught.value.limit, caught.value.retry_after_s) == ("max_tokens", None)


def test_a_map_waits_at_a_limit_and_goes_on(yard: StandIn, new_client: NewClient) -> None:
    """And an item that is never admitted has the refusal as its result."""
    limit(yard, max_waiting_requests=2, max_tokens=20)
    yard.connection.hset(yard.keys.info, "rate", 100)  # so they come back soon
    items = [{"prompt": [number], "max_tokens": 99 if number == 3 else 5} for number in range(9)]
    with taking_turns(yard.answer_all):
        results = dict(new_client().map(items, tenant="acme"))
    assert results.pop(3).error.code == Code.QUOTA_EXCEEDED
    assert len(results) == 8
    assert all(result.ok for result in results.values())
