"""What the leader remembers of those that were served before a request."""

from __future__ import annotations

import pytest

from coordinator.dispatch.served_log import _KEPT, _MOST, ServedLog
from coordinator.dispatch.tenant_shares import TenantShares
from coordinator.routing.queued_request import QueuedRequest


def queued(tenant: str = "acme", since_s: float = 0.0, name: str = "normal") -> QueuedRequest:
    intake = f"{name}:{tenant}" if tenant else name
    return QueuedRequest(intake=intake, entry="1-0", id="q", since_ms=since_s * 1000, tenant=tenant)


def serve(
    log: ServedLog, at_s: float, *requests: QueuedRequest, held: tuple[str, ...] = ()
) -> None:
    log.begin_turn(at_s * 1000, held)
    for request in requests:
        log.note(request)


def test_own_ones_by_class_and_the_sum_of_others() -> None:
    log = ServedLog()
    serve(log, 0.5)
    serve(log, 10.2, *[queued("bolt")] * 5, queued(""), *[queued("acme", name="high")] * 2)
    serve(log, 11.9, *[queued("acme")] * 3)
    serve(log, 20.0)
    told = log.tell(queued(since_s=5), 20_000)
    assert told == "served before it: 6 of others, 2 high of its own, 3 normal of its own"
    assert log.tell(queued("bolt", since_s=5), 20_000).startswith(
        "served before it: 6 of others, 5"
    )
    assert log.tell(queued("", since_s=5), 20_000).endswith("10 of others, 1 normal of its own")


def test_no_more_is_told_than_was_served_since_it_came() -> None:
    log = ServedLog()
    serve(log, 0.5)
    serve(log, 10.1, queued("bolt"))
    serve(log, 12.1, queued("bolt"))
    serve(log, 14.0)
    # What was served in the second in which it came may have been before it.
    assert log.tell(queued(since_s=10.0), 14_000) == "served before it: 1 of others"
    assert log.tell(queued(since_s=9.9), 14_000) == "served before it: 2 of others"
    assert log.tell(queued(since_s=12.5), 14_000) == ""


def test_the_time_at_a_limit() -> None:
    log = ServedLog()
    for at_s in range(1, 13):
        serve(log, at_s, held=("acme",) if at_s > 4 else ())
        serve(log, at_s + 0.5, held=("acme",))  # once a second
    told = log.tell(queued(since_s=2), 13_000)
    assert told == "its tenant ran max_running_requests for about 8.0 s"
    assert log.tell(queued("bolt", since_s=2), 13_000) == ""


@pytest.mark.parametrize(
    "request_", [queued(since_s=19.5), queued(since_s=1, name="retry", tenant="")]
)
def test_short_waits_and_retries_are_told_nothing(request_: QueuedRequest) -> None:
    log = ServedLog()
    serve(log, 0.5)
    serve(log, 20.0, queued("bolt"))
    assert log.tell(request_, 20_000) == ""


def test_a_new_leader_says_that_it_knows_only_its_own_term() -> None:
    log = ServedLog()
    serve(log, 0.5, queued("bolt"))
    log.clear()
    serve(log, 10.5, queued("bolt"))
    serve(log, 20.0)
    told = log.tell(queued(since_s=5), 20_000)
    assert told == "served before it by this leader: 1 of others"


def test_its_memory_is_bounded() -> None:
    log = ServedLog()
    for number in range(4 * _MOST):
        serve(log, number, queued(f"t{number}"), held=(f"t{number}",))
    assert len(log._by_intake._by_name) <= _MOST
    for at_s in range(4 * _MOST, 4 * _MOST + 5 * _KEPT):
        serve(log, at_s, queued("acme"))
    end_s = 4 * _MOST + 5 * _KEPT
    serve(log, end_s)
    assert len(log._all._steps) <= 2 * _KEPT
    told = log.tell(queued(since_s=end_s - 100.5), end_s * 1000)
    assert told == "served before it: 100 normal of its own"
    # Of a request that waited longer than is remembered, what is remembered.
    assert "normal of its own" in log.tell(queued(since_s=1), end_s * 1000)


def test_where_not_all_are_counted_one_by_one_only_the_sum_is_told() -> None:
    log = ServedLog()
    serve(log, 0.5)
    serve(log, 10.0, *[queued(f"t{number}") for number in range(_MOST + 20)])
    serve(log, 20.0)
    assert log.tell(queued(since_s=5), 20_000) == f"served before it: {_MOST + 20} in all"
    told = log.tell(queued("t7", since_s=5), 20_000)
    assert told == f"served before it: {_MOST + 20} in all, 1 normal of its own"


def test_nothing_is_kept_while_nobody_is_in_line() -> None:
    shares = TenantShares()
    shares.begin_turn(5_000)
    assert shares.served._step == -1
    assert shares.explain(queued(""), 99_000, "round_robin") == "round_robin"


def test_other_tenants_are_not_named() -> None:
    log = ServedLog()
    serve(log, 0.5)
    serve(log, 10.0, queued("bolt"))
    serve(log, 20.0)
    assert "bolt" not in log.tell(queued(since_s=5), 20_000)
