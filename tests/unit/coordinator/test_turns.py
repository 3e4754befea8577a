"""How long a model keeps its device: by settings, else by the cost of swaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.placement.needs import LEAST_S, MOST_S, UNMEASURED_S, Catalog, turn_s
from tests.support.situations import NOW_MS, decide, demand, host, loads, worker


def turns(fixed_s: float = 0.0, share: float = 0.1, **models: Mapping[str, Any]) -> Catalog:
    hosts = host("h", **models)
    return Catalog(hosts, now_ms=NOW_MS, max_model_wait_s=fixed_s, max_swap_share=share)


@pytest.mark.parametrize(
    ("cost_s", "share", "expected_s"),
    [
        (0.2, 0.1, 2.0),
        (20.0, 0.1, 200.0),
        (20.0, 0.5, 40.0),
        (0.001, 0.1, LEAST_S),
        (500.0, 0.1, MOST_S),
    ],
)
def test_a_turn_is_as_long_as_the_cost_of_a_swap_demands(
    cost_s: float, share: float, expected_s: float
) -> None:
    assert turn_s(cost_s, share) == pytest.approx(expected_s)


def test_the_cost_of_a_swap_counts_before_the_cost_of_a_load() -> None:
    """Given a model that was woken after it had been loaded, I expect the wake to count."""
    found = turns(a={"load_s": 20.0, "swap_s": 0.4}, b={"load_s": 20.0})

    assert (found.wait_s("a"), found.wait_s("b")) == (4.0, 200.0)


def test_models_wait_as_for_the_quickest_host_and_hold_as_on_their_own() -> None:
    hosts = host("h", a={"swap_s": 2.0}, b={}) | host("i", a={"swap_s": 0.5}, b={})
    found = Catalog(hosts, now_ms=NOW_MS, max_model_wait_s=0.0, max_swap_share=0.1)

    assert found.wait_s("a") == 5.0
    assert found.hold_s("a", "h", "b", 0.0) == 20.0
    assert found.hold_s("a", "i", "b", 0.0) == 5.0


def test_a_model_that_was_never_loaded_costs_as_much_as_the_most_expensive_on_its_hosts() -> None:
    assert turns(a={}, b={"swap_s": 0.2}, c={"swap_s": 0.5}).wait_s("a") == 5.0
    assert turns(a={}, b={"swap_s": 50.0}).wait_s("a") == UNMEASURED_S
    assert turns(a={}, b={}).wait_s("a") == UNMEASURED_S
    assert turns(a={}).wait_s("of nobody") == UNMEASURED_S


def test_the_first_load_counts_before_its_host_has_reported_it() -> None:
    assert turns(a={}, b={}).hold_s("a", "h", "b", spent_s=0.3) == pytest.approx(3.0)


def test_a_set_turn_comes_first() -> None:
    found = turns(7.0, a={"swap_s": 1.0}, b={"swap_s": 1.0, "max_model_wait_s": 500.0})

    assert (found.wait_s("a"), found.wait_s("b")) == (7.0, 500.0)
    assert (found.hope_s("a"), found.hope_s("b")) == (7.0, 500.0)


def test_two_models_with_waits_of_their_own_keep_a_device_for_the_shorter() -> None:
    found = turns(a={"max_model_wait_s": 5.0}, b={"max_model_wait_s": 500.0}, c={"swap_s": 60.0})

    assert found.hold_s("a", "h", "b", 0.0) == found.hold_s("b", "h", "a", 0.0) == 5.0
    assert found.hold_s("c", "h", "a", 0.0) == 5.0  # its own wait is set
    assert found.hold_s("b", "h", "c", 0.0) == 500.0


def test_requests_wait_for_an_absent_host_however_quick_swaps_are() -> None:
    assert turns(a={"swap_s": 0.1}).hope_s("a") == UNMEASURED_S


@pytest.mark.parametrize(("waited_s", "expected"), [(1.9, []), (2.1, [("w.1", "a")])])
def test_a_small_model_gets_a_busy_device_after_two_seconds(
    waited_s: float, expected: list[tuple[str, str]]
) -> None:
    hosts = host(a={"swap_s": 0.2, "load_s": 0.1}, b={"swap_s": 0.2, "load_s": 0.1})
    busy = [worker("w.1", "b", load=3, swapped_s=waited_s)]

    placement = decide([demand("a", wait_s=waited_s)], busy, hosts, wait_s=0.0)

    assert loads(placement) == expected


@pytest.mark.parametrize(("held_s", "expected"), [(199, []), (201, [("w.1", "a")])])
def test_a_large_model_keeps_its_device_for_longer_than_a_small_one_waits(
    held_s: float, expected: list[tuple[str, str]]
) -> None:
    """I expect that busy or idle: else each request for the small one would cost 20 s."""
    hosts = host(a={"swap_s": 0.2}, b={"swap_s": 20.0})
    for load in (0, 3):
        workers = [worker("w.1", "b", load=load, swapped_s=held_s)]
        placement = decide([demand("a", wait_s=9)], workers, hosts, wait_s=0.0)
        assert loads(placement) == expected


def test_a_group_is_gathered_for_longer_than_the_longest_turn() -> None:
    """Given a small group that waits while a large model holds, I expect it not to give up."""
    models = {"b": {"swap_s": 1.0}, "c": {"swap_s": 20.0}, "d": {"swap_s": 1.0}}
    hosts = host(devices=2, big={"ranks": 2, "swap_s": 0.2}, **models)
    workers = [
        worker("v.1", "b", load=1, swapped_s=20, device=0),
        worker("w.2", "c", load=1, swapped_s=150, device=1),
    ]
    group, other = demand("big", wait_s=160), demand("d", wait_s=50)

    assert loads(decide([other], workers, hosts, wait_s=0.0)) == [("v.1", "d")]
    assert loads(decide([group, other], workers, hosts, wait_s=0.0)) == []
