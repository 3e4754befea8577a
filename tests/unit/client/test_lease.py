"""What a client keeps of the requests that are to end with it."""

from __future__ import annotations

import pytest

from tests.support.builders import make_delta, make_result
from tokenyard.client.lease import RENEW_EVERY_S, Attendance
from tokenyard.client.pending import Exchange
from tokenyard.protocol.errors import UnknownRequest, WaitTimeout


def attended(*names: str, now: float = 0.0) -> tuple[Attendance, list[Exchange]]:
    attendance = Attendance()
    exchanges = [Exchange(name, None, now) for name in names]
    attendance.attach(exchanges, now)
    return attendance, exchanges


def test_without_requests_there_is_nothing_to_tell() -> None:
    attendance, _ = attended()
    assert not attendance.has_any
    assert not attendance.is_due(1e9)


def test_the_lease_is_renewed_in_time() -> None:
    attendance, _ = attended("q", now=100.0)
    assert not attendance.is_due(100.0 + RENEW_EVERY_S / 2)
    assert attendance.is_due(100.0 + RENEW_EVERY_S)
    assert attendance.take_ended(100.0 + RENEW_EVERY_S) == []
    assert not attendance.is_due(100.0 + RENEW_EVERY_S)


def test_submitting_renews_it_too() -> None:
    attendance, exchanges = attended("q")
    attendance.attach(exchanges, RENEW_EVERY_S)
    assert not attendance.is_due(RENEW_EVERY_S)


def test_what_has_its_result_is_told_once_and_let_go() -> None:
    attendance, [over, running] = attended("over", "running")
    over.take(make_delta("over", 0, [1]), 0.0)
    assert attendance.unfinished() == ["over", "running"]
    over.take(make_result("over", [1]), 0.0)
    running.take(make_delta("running", 0, [1]), 0.0)
    assert attendance.unfinished() == ["running"]
    assert attendance.take_ended(0.0) == ["over"]
    assert attendance.take_ended(0.0) == []
    assert attendance.has_any


def test_a_result_that_was_there_before_counts() -> None:
    exchange = Exchange("q", None, 0.0)
    exchange.take(make_result("q", [1]), 0.0)
    attendance = Attendance()
    attendance.attach([exchange], 0.0)
    assert attendance.unfinished() == []


def test_what_nobody_waits_for_any_more_has_not_ended() -> None:
    attendance, [given_up, forgotten] = attended("given up", "forgotten")
    given_up.fail(WaitTimeout("closed"))
    forgotten.fail(UnknownRequest("by the yard"))
    assert attendance.unfinished() == ["given up"]


def test_many_that_have_ended_are_told_before_the_lease_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenyard.client.lease.MANY_ENDED", 2)
    attendance, exchanges = attended("a", "b", "c")
    for exchange in exchanges[:2]:
        assert not attendance.is_due(0.0)
        exchange.take(make_result(exchange.id, [1]), 0.0)
    assert attendance.is_due(0.0)
