"""The arithmetic of `benchmarks/fairness`, its loads, and its reference scheduler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from benchmarks.fairness.__main__ import Flood, Greed, Measured, faults, targets
from benchmarks.fairness.figures import (
    Sample,
    Window,
    in_engines,
    largest_difference,
    light_ratio,
    missed,
    overtakers,
    service,
    share_error,
    shares,
    tokens_per_s,
    waits_ms,
)
from benchmarks.fairness.loads import CHAT, DOCUMENTS, WRITING, Ask, Speed, asks
from benchmarks.fairness.vtc import VirtualTokenCounter

ASK = Ask([1] * 10, [2] * 20)  # a service of 50
WINDOW = Window(10.0, 20.0)
FLOOD = Flood(
    alone_p50_ms=5.0,
    alone_p99_ms=10.0,
    p50_ms=50.0,
    p99_ms=56.0,
    unanswered=0,
    service_ms=100.0,
    tokens_per_s=99.0,
    in_engines=8.0,
    out_of_turn=9,
    wrong=0,
)
GREED = Greed({"a": 1.0, "b": 0.99}, 0.01, 500.0, 100.0, 8.0, 0)


def sample(tenant: str, start: float, end: float, due: float = 0.0) -> Sample:
    """A request that was in the engine from start to end."""
    return Sample(tenant, ASK, due, end, engine_s=end - start)


def test_a_request_that_is_half_in_the_window_counts_half() -> None:
    samples = [sample("a", 5, 15), sample("a", 12, 14), sample("b", 19, 29), sample("b", 20, 21)]

    assert service(samples, WINDOW) == pytest.approx({"a": 75.0, "b": 5.0})
    assert tokens_per_s(samples, WINDOW) == pytest.approx((15 + 30 + 3) / 10)
    assert in_engines(samples, WINDOW) == pytest.approx((5 + 2 + 1) / 10)


def test_shares_are_by_weight() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}

    assert shares({"a": 10.0, "b": 20.0, "c": 10.0}, weights) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert share_error(shares({"a": 10.0, "b": 30.0}, weights)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (Sample("a", ASK, due_s=11.0, done_s=13.0, engine_s=1.5, first_token_s=0.25), 750.0),
        (Sample("a", ASK, due_s=11.0), 14_000.0),
    ],
)
def test_a_wait_lasts_to_the_first_token_or_to_the_end_of_the_run(
    one: Sample, expected: float
) -> None:
    assert waits_ms([one], WINDOW, 25.0) == [expected]


def test_only_what_was_due_in_the_window_waits() -> None:
    assert waits_ms([sample("a", 11, 12, due=9.0), sample("a", 21, 22, due=20.0)], WINDOW, 25) == []


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_the_largest_difference_is_that_of_any_interval(first: str, second: str) -> None:
    """Given that one is served and then the other, I expect what the one had meanwhile."""
    samples = [sample(first, 10, 15), sample(second, 15, 20)]

    assert largest_difference(samples, WINDOW, {"a": 1.0, "b": 1.0}) == pytest.approx(50.0)
    assert largest_difference(samples, WINDOW, {first: 2.0, second: 1.0}) == pytest.approx(50.0)
    assert largest_difference(samples, WINDOW, {first: 2.0, second: 4.0}) == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([sample("flood", 0, 5, due=1.0), sample("a", 0, 4, due=2.0)], 1),
        ([sample("flood", 0, 3, due=1.0), sample("a", 0, 4, due=2.0)], 0),
        ([sample("flood", 0, 5, due=2.0), sample("a", 0, 4, due=2.0)], 0),
        ([sample("flood", 0, 5, due=3.0), sample("a", 0, 4, due=2.0)], 0),
        ([Sample("flood", ASK, 1.0), sample("a", 0, 4, due=2.0), Sample("a", ASK, 2.0)], 1),
    ],
)
def test_who_was_answered_before_an_older_request_of_the_flood(
    samples: Sequence[Sample], expected: int
) -> None:
    assert overtakers(samples) == expected


def test_a_wait_may_have_a_fifth_more_and_one_service_time() -> None:
    assert light_ratio(112.0, 10.0, 100.0) == 1.0
    assert FLOOD.ratio == 0.5


def test_targets_are_those_of_the_yards_own_tenants() -> None:
    fifo = Flood(9, 9, 9, 9, 9, 9, tokens_per_s=100.0, in_engines=8.0, out_of_turn=0, wrong=0)
    measured = Measured({"fifo": {2: fifo}, "tenants": {2: FLOOD}}, {"tenants": GREED})

    found = targets(measured)

    assert found == {"light_p99_ratio": 0.5, "share_error": 0.01, "throughput_ratio": 0.99}
    assert missed(found) == list(faults(measured)) == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"light_p99_ratio": 1.1, "share_error": 0.0, "throughput_ratio": 1.0}, "light_p99_ratio"),
        ({"light_p99_ratio": 0.5, "share_error": 0.03, "throughput_ratio": 1.0}, "share_error"),
        ({"light_p99_ratio": 0.5, "share_error": 0.0, "throughput_ratio": 0.9}, "throughput_ratio"),
        ({"light_p99_ratio": 0.5, "share_error": 0.0}, "throughput_ratio: not measured"),
        (
            {"light_p99_ratio": math.inf, "share_error": 0.0, "throughput_ratio": 1.0},
            "light_p99_ratio",
        ),
    ],
)
def test_a_missed_target_is_named(found: dict[str, float], says: str) -> None:
    (fault,) = missed(found)
    assert fault.startswith(says)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (
            Measured({}, {"tenants": Greed({}, 1.5, 0.0, 1.0, 8.0, 0)}),
            "differs from its due by 150%",
        ),
        (Measured({}, {"fifo": Greed({}, 1.5, 0.0, 1.0, 8.0, 2)}), "2 answers were wrong"),
        (
            Measured(
                {"tenants": {2: Flood(1, 1, 1, 1, 0, 1, 1.0, 8.0, out_of_turn=0, wrong=0)}}, {}
            ),
            "nobody was served before the flood",
        ),
    ],
)
def test_what_is_wrong_at_any_speed_is_a_fault(measured: Measured, says: str) -> None:
    (fault,) = faults(measured)
    assert says in fault


def test_the_counter_serves_by_weight_and_saves_nothing_up() -> None:
    """Given one that comes late, I expect its share from then on, not what it did not use."""
    counter = VirtualTokenCounter[str]({"a": 1.0, "b": 2.0, "late": 1.0})
    for name in ("a", "b") * 100:
        counter.add(name, 10.0, name)
    first = Counter(counter.take() for _ in range(60))
    for _ in range(100):
        counter.add("late", 10.0, "late")
    then = Counter(counter.take() for _ in range(80))

    assert first == {"a": 20, "b": 40}
    assert then == {"a": pytest.approx(20, abs=1), "b": 40, "late": pytest.approx(20, abs=1)}


def test_the_counter_is_empty_when_all_was_taken() -> None:
    counter = VirtualTokenCounter[int]({"a": 1.0})
    counter.add("a", 1.0, 7)

    assert (bool(counter), counter.take(), bool(counter)) == (True, 7, False)


def test_loads_repeat_and_are_heavy_tailed() -> None:
    one = asks(CHAT, seed=1)
    lengths = sorted(len(each.prompt) for each in one)

    assert one == asks(CHAT, seed=1)
    assert one != asks(CHAT, seed=2)
    assert lengths[-1] > 5 * lengths[len(lengths) // 2]
    assert all(each.answer.index(each.answer[-1]) == len(each.answer) - 1 for each in one)


def test_mixes_differ_in_what_a_request_costs() -> None:
    """Otherwise turns by request would be as fair as shares of tokens."""
    means = [sum(one.service for one in asks(mix, 1)) for mix in (WRITING, CHAT, DOCUMENTS)]

    assert means[0] * 1.5 < means[1] < means[2] / 1.5


def test_capacity_counts_prefill_and_a_full_batch() -> None:
    speed = Speed(workers=2, max_num_seqs=4, prefill_rate=1000.0, step_s=0.01)

    assert speed.capacity([ASK]) == pytest.approx(2 / (0.01 + 0.05))
