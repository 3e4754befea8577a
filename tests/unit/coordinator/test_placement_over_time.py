"""The placement in a made-up yard whose clock the test turns: swaps, waits and throughput."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.unit.coordinator.made_up_yard import UNLOAD_S, Model, Yard


def alternating(count: int, *models: str) -> list[str]:
    return list(islice(cycle(models), count))


def test_a_thousand_alternating_requests_at_once_on_one_device() -> None:
    """I expect few swaps, and at least 70 % of the throughput of one model alone."""
    alone = Yard([Model("a")], devices=1)
    alone.submit(*["a"] * 1000)
    alone.run_until_served(1000)

    yard = Yard([Model("a"), Model("b")], devices=1)
    yard.submit(*alternating(1000, "a", "b"))
    yard.run_until_served(1000)

    assert yard.served == {"a": 500, "b": 500}
    assert len(yard.swaps) <= 1 + yard.now_s / yard.wait_s
    assert alone.now_s / yard.now_s >= 0.7


def test_alternating_requests_that_keep_coming_do_not_thrash() -> None:
    """Given a device that is idle between two requests, I expect batches of each model still."""
    yard = Yard([Model("a"), Model("b")], devices=1)
    for model in alternating(200, "a", "b"):
        yard.submit(model)
        yard.run(0.5)
    yard.run_until_served(200)

    assert yard.shortest_time_between_swaps() >= yard.wait_s
    assert yard.longest_wait_s <= 2 * yard.wait_s


def test_a_growing_queue_gets_all_devices_and_gives_one_back() -> None:
    yard = Yard([Model("a"), Model("b")], devices=4)
    yard.submit(*["a"] * 3000)
    yard.run(10.0)
    assert [device.model for device in yard.devices] == ["a"] * 4

    yard.submit("b")
    yard.run(yard.wait_s + 3.0)

    assert yard.served["b"] == 1
    assert Counter(device.model for device in yard.devices)["b"] == 1


def test_a_pinned_model_is_there_before_its_first_request_and_stays() -> None:
    yard = Yard([Model("a", pin=1), Model("b"), Model("c")], devices=2)
    yard.run(3.0)
    assert Counter(device.model for device in yard.devices)["a"] == 1

    yard.submit(*alternating(600, "b", "c"))
    while yard.served.total() < 600:
        yard.step()
        assert any(one.model == "a" and one.state == "ready" for one in yard.devices)


def test_a_group_gets_its_devices_among_models_that_swap_all_the_time() -> None:
    models = [Model(name) for name in "abcd"]
    yard = Yard([Model("big", ranks=2), *models], devices=2)
    for _ in range(60):
        yard.submit(*"abcd")
        yard.run(0.5)
    yard.submit("big")
    for _ in range(200):
        yard.submit(*"abcd")
        yard.run(0.5)

    assert yard.served["big"] == 1


class TestTurnsByCost:
    """No wait is set: turns follow from the cost of swaps."""

    @pytest.mark.parametrize("load_s", [0.1, 5.0])
    def test_small_models_take_quick_turns_and_large_ones_slow_ones(self, load_s: float) -> None:
        """Given twice the load of a device, I expect both served and a tenth lost at most."""
        yard = Yard([Model("a", load_s), Model("b", load_s)], devices=1, wait_s=0.0)
        for _ in range(400):
            yard.submit(*["a"] * 10, *["b"] * 10)
            yard.run(0.5)

        turn_s = (load_s + UNLOAD_S) / 0.1
        assert min(yard.served.values()) > 0.4 * yard.served.total(), yard.served
        assert yard.shortest_time_between_swaps() >= turn_s
        assert yard.lost_s[0] <= 0.1 * yard.now_s + load_s + UNLOAD_S + yard.granularity_s
        assert len(yard.swaps) >= 0.5 * yard.now_s / turn_s

    def test_a_rare_request_for_another_model_waits_a_moment(self) -> None:
        """Given a device that is idle between two requests, as in a first trial."""
        yard = Yard([Model("a", 0.1), Model("b", 0.1)], devices=1, wait_s=0.0)
        for model in alternating(100, "a", "b"):
            yard.submit(model)
            yard.run(1.0)
        yard.run_until_served(100)

        assert yard.longest_wait_s <= 2 * (0.1 + UNLOAD_S) / 0.1

    @pytest.mark.long
    def test_a_large_model_gets_its_turn_among_small_ones_that_swap_all_the_time(self) -> None:
        small = [Model("a", 0.1), Model("b", 0.1)]
        yard = Yard([*small, Model("large", 8.0)], devices=1, wait_s=0.0)
        yard.submit("large")  # so that its cost is known
        yard.run(100.0)
        for _ in range(600):
            yard.submit(*"aaaaabbbbb")
            yard.run(0.5)
            if yard.now_s == pytest.approx(200.0, abs=0.3):
                yard.submit("large")

        assert yard.served["large"] == 2
        assert len(yard.swaps) > 40


Arrivals = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.0, 4.0)), max_size=40)


# Shrinking a yard takes minutes.
@pytest.mark.long
@settings(max_examples=examples(5, deep=45), phases=[Phase.generate])
@given(
    devices=st.integers(1, 3),
    load_s=st.lists(st.floats(0.1, 2.0), min_size=4, max_size=4),
    shares=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    ranks=st.integers(1, 2),
)
def test_swaps_take_their_share_at_most_and_no_model_starves(
    devices: int, load_s: list[float], shares: list[int], ranks: int
) -> None:
    """Given an overload of four models, one of them a group, for a long time."""
    models = [Model(name, one) for name, one in zip("abcd", load_s, strict=True)]
    models[1].ranks = min(ranks, devices)
    yard = Yard(models, devices, wait_s=0.0)
    yard.measured = set("abcd")
    while yard.now_s < 100.0:
        for model, share in zip("abcd", shares, strict=True):
            yard.submit(*model * share)
        yard.run(0.5)

    dearest_s = max(load_s) + UNLOAD_S
    for device in yard.devices:
        most_s = 0.1 * yard.now_s + dearest_s + yard.granularity_s
        # The devices of a group wait for each other, which is not measured before.
        assert yard.lost_s[device.index] <= most_s or models[1].ranks > 1
    assert set(yard.served) == set("abcd")


@pytest.mark.long
@settings(max_examples=examples(30, deep=240))
@given(
    devices=st.integers(1, 4),
    arrivals=Arrivals,
    loads=st.lists(st.floats(0.1, 8.0), min_size=4, max_size=4),
    ranks=st.integers(1, 3),
    pin=st.integers(0, 1),
)
def test_every_request_is_served_and_no_device_thrashes(
    devices: int, arrivals: list[tuple[str, float]], loads: list[float], ranks: int, pin: int
) -> None:
    """Whatever comes whenever, as long as the pinned model leaves enough devices."""
    models = [Model(name, load_s) for name, load_s in zip("abcd", loads, strict=True)]
    models[0].pin = pin if devices > 1 else 0
    models[1].ranks = min(ranks, devices - models[0].pin)
    yard = Yard(models, devices)
    for model, pause_s in arrivals:
        yard.submit(model)
        yard.run(pause_s)

    yard.run_until_served(len(arrivals))

    assert yard.shortest_time_between_swaps() >= yard.wait_s
    assert all(command.why for command in yard.commands)
