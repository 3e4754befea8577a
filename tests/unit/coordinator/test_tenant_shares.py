"""The order among tenants: who has had least is next, as far as the line is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import pytest

from coordinator.dispatch.backlog import ModelQueue
from coordinator.dispatch.tenant_shares import USUAL_AT_FIRST, TenantShares
from coordinator.routing.queued_request import QueuedRequest
from tokenyard.protocol.tenants import TenantSettings


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

    def test_weights_divide_what_each_is_charged(self) -> None:
        shares = in_line({"a": 0.0, "b": 0.0, "c": 0.0})
        for name, weight in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
            shares.configure(name, TenantSettings(weight=weight))

        served = Counter(order(holding(shares, flood("a", "b", "c")), 70))

        assert served == {"a": 10, "b": 20, "c": 40}

    def test_long_requests_count_for_more(self) -> None:
        shares = in_line({"a": 0.0, "b": 0.0})
        shares.state("b").usual = 60
        long = [queued("b", number, tokens=30, max_output=60) for number in range(99)]

        assert Counter(order(holding(shares, [*flood("a"), *long]), 40)) == {"a": 30, "b": 10}

    def test_those_without_a_tenant_stand_in_line_as_one(self) -> None:
        queue = holding(in_line({"": 0.0, "a": 0.0}), flood("a", ""))

        assert order(queue, 6) == "-a-a-a"

    def test_without_a_line_there_are_no_tenants(self) -> None:
        shares = TenantShares()
        queue = holding(shares, flood(""))

        assert order(queue, 3) == "---"
        assert shares.charge(queued("", 1)) is None

    def test_retries_come_first_and_count(self) -> None:
        retries = [queued("a", number, intake="retry") for number in range(3)]
        queue = holding(in_line({"a": 0.0, "b": 0.0}), [*flood("a", "b"), *retries])

        assert order(queue, 8) == "aaabbbab"

    def test_classes_have_their_shares_inside_a_tenant(self) -> None:
        low = [queued("a", number, intake="low:a") for number in range(100)]
        queue = holding(in_line({"a": 0.0}), [*low, *flood("a")])

        served = [one.intake for one in islice(queue.others, 50)]

        assert Counter(served) == {"normal:a": 40, "low:a": 10}

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


class TestLimits:
    def test_a_tenant_at_its_limit_is_passed_over(self) -> None:
        shares = in_line({"a": 0.0, "b": 0.0})
        shares.configure("a", TenantSettings(max_running_requests=3))
        shares.count("a", usual=32, running=1)

        assert order(holding(shares, flood("a", "b")), 8) == "ababbbbb"

    def test_a_tenant_at_its_limit_does_not_hide_those_behind(self) -> None:
        shares = in_line({"a": 0.0}, has_more=True)
        shares.configure("a", TenantSettings(max_running_requests=1))
        shares.count("a", usual=32, running=1)

        assert order(holding(shares, flood("a", "b")), 3) == "bbb"


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

    def test_a_new_tenant_is_charged_a_common_length(self) -> None:
        amount = in_line({"a": 0.0}).amount(queued("a", 1, max_output=10**9))

        assert amount == 10 + 2 * USUAL_AT_FIRST

    def test_a_dispatched_request_counts_at_once(self) -> None:
        shares = in_line({"a": 0.0})
        charge = shares.charge(queued("a", 1))
        assert charge is not None

        shares.note_dispatched(charge)

        assert shares.service("a") == 50.0
        assert shares.state("a").running == 1
