"""What a client keeps of the requests that are to end with it."""

from __future__ import annotations

import pytest

from tests.support.builders import make_delta, make_result
from tokenyard.client.pending import PendingRequest
from tokenyard.client.state import RENEW_EVERY_S, ClientLease
from tokenyard.protocol.errors import UnknownRequest, WaitTimeout


def attended(*names: str, now: float = 0.0) -> tuple[ClientLease, list[PendingRequest]]:
    client_lease = ClientLease()
    requests = [PendingRequest(name, None, now) for name in names]
    client_lease.attach(requests, now)
    return client_lease, requests


def test_without_requests_there_is_nothing_to_tell() -> None:
    client_lease, _ = attended()
    assert not client_lease.has_any
    assert not client_lease.is_due(1e9)


def test_the_lease_is_renewed_in_time_and_by_each_submission() -> None:
    client_lease, requests = attended("q", now=100.0)
    assert not client_lease.is_due(100.0 + RENEW_EVERY_S / 2)
    assert client_lease.is_due(100.0 + RENEW_EVERY_S)
    assert client_lease.take_ended(100.0 + RENEW_EVERY_S) == []
    assert not client_lease.is_due(100.0 + RENEW_EVERY_S)
    client_lease.attach(requests, 100.0 + 2 * RENEW_EVERY_S)
    assert not client_lease.is_due(100.0 + 2 * RENEW_EVERY_S)


def test_requests_with_a_result_are_reported_once_and_detached() -> None:
    client_lease, [over, running] = attended("over", "running")
    over.take(make_delta("over", 0, [1]), 0.0)
    assert client_lease.unfinished() == ["over", "running"]
    over.take(make_result("over", [1]), 0.0)
    running.take(make_delta("running", 0, [1]), 0.0)
    assert client_lease.unfinished() == ["running"]
    assert client_lease.take_ended(0.0) == ["over"]
    assert client_lease.take_ended(0.0) == []
    assert client_lease.has_any


def test_a_result_that_was_there_before_counts() -> None:
    pending = PendingRequest("q", None, 0.0)
    pending.take(make_result("q", [1]), 0.0)
    client_lease = ClientLease()
    client_lease.attach([pending], 0.0)
    assert client_lease.unfinished() == []


def test_a_forgotten_request_has_not_ended() -> None:
    client_lease, [given_up, forgotten] = attended("given up", "forgotten")
    given_up.fail(WaitTimeout("closed"))
    forgotten.fail(UnknownRequest("by the yard"))
    assert client_lease.unfinished() == ["given up"]


def test_many_ended_requests_are_reported_before_the_lease_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenyard.client.state.MANY_ENDED", 2)
    client_lease, requests = attended("a", "b", "c")
    for pending in requests[:2]:
        assert not client_lease.is_due(0.0)
        pending.take(make_result(pending.id, [1]), 0.0)
    assert client_lease.is_due(0.0)
