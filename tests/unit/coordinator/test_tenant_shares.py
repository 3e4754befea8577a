"""The order among tenants: who has had least is next, as far as the line is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import pytest

from coordinator.dispatch.backlog import ModelQueue
from coordinator.dispatch.tenant_shares import TenantShares
from coordinator.routing.queued_request import QueuedRequest


def queued(tenant: str, number: int, **fields: Any) -> QueuedRequest:
    known = {"intake": f"normal:{tenant}" if tenant else "normal", "tokens": 10, "max_output": 20}
    name = f"{tenant}{number}"
    return QueuedRequest(entry=f"{number}-0", id=name, tenant=tenant, **(known | fields))


def in_line(first: Mapping[str, float], *, has_more: bool = False) -> TenantShares:
    shares = TenantShares()
    shares.see(first, has_more=has_more)
    return shares


def holding(shares: TenantShares, requests: Iterable[QueuedRequest]) -> ModelQueue:
    queue = ModelQueue(shares)
    for one in requests:
        queue.add(one)
    return queue


def flood(*tenants: str, count: int = 100) -> list[QueuedRequest]:
    return [queued(tenant, number) for tenant in tenants for number in range(count)]


def order(queue: ModelQueue, count: int = 1000) -> str:
    """The tenants of the next requests, each a letter; "-" is none."""
    return "".join(one.tenant or "-" for one in islice(queue.others, count))


class TestOrder:
    def test_who_has_had_least_is_next_until_it_has_had_as_much(self) -> None:
        # Given requests of 10 + 2 * 20 tokens each, and a tenant that has had three of them
        queue = holding(in_line({"b": 0.0, "a": 150.0}), flood("a", "b"))

        assert order(queue, 7) == "bbbabab"

    def test_without_a_line_there_are_no_tenants(self) -> None:
        shares = TenantShares()
        queue = holding(shares, flood(""))

        assert order(queue, 3) == "---"
        assert shares.charge(queued("", 1)) is None

    def test_retries_come_first_and_count(self) -> None:
        retries = [queued("a", number, intake="retry") for number in range(3)]
        queue = holding(in_line({"a": 0.0, "b": 0.0}), [*flood("a", "b"), *retries])

        assert order(queue, 8) == "aaabbbab"

    def test_what_another_model_gets_in_this_turn_counts(self) -> None:
        shares = in_line({"a": 0.0, "b": 0.0})
        queue = holding(shares, flood("a", "b"))

        shares.plan([queued("a", 1), queued("a", 2)])

        assert order(queue, 4) == "bbab"


class TestHorizon:
    """Behind the first page of the line nothing is known exactly."""

    def test_a_plan_ends_where_those_behind_the_page_might_be_next(self) -> None:
        queue = holding(in_line({"a": 0.0, "b": 60.0}, has_more=True), flood("a", "b"))

        assert order(queue) == "aab"  # a is at 100, b at 110, and a third may be at 60

    def test_those_behind_it_are_served_while_the_first_want_nothing_here(self) -> None:
        shares = in_line({"a": 0.0}, has_more=True)
        shares.note("b", 5.0)

        assert order(holding(shares, flood("b", "c", count=3))) == "cbcbcb"

    def test_a_plan_ends_at_a_tenant_that_was_not_read_to_its_end(self) -> None:
        shares = in_line({"a": 0.0, "b": 120.0})
        shares.unread = {"a"}

        assert order(holding(shares, [*flood("a", count=2), *flood("b")])) == "aa"


class TestCharge:
    @pytest.mark.parametrize(
        ("max_output", "usual", "expected"), [(20, 512.0, 50.0), (4000, 100.0, 210.0)]
    )
    def test_the_usual_length_caps_what_may_be_generated(
        self, max_output: int, usual: float, expected: float
    ) -> None:
        shares = in_line({"a": 0.0})
        shares.state("a").usual = usual

        assert shares.amount(queued("a", 1, max_output=max_output)) == expected

    def test_a_dispatched_request_counts_at_once(self) -> None:
        shares = in_line({"a": 0.0})
        charge = shares.charge(queued("a", 1))
        assert charge is not None

        shares.note_dispatched(charge)

        assert shares.service("a") == 50.0
        assert shares.state("a").running == 1
