"""Policies that look for prefixes: pure functions of lanes and matches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.policies import (
    LEAST_MATCH,
    LOPSIDED_REQUESTS,
    NEAR_REQUESTS,
    Lane,
    Match,
    Matches,
    Pick,
    is_lopsided,
    least_loaded,
    megatron,
    prefix_affinity,
)
from tests.unit.coordinator.test_policies import any_lanes, lane

AFFINE = [prefix_affinity, megatron]
Affine = Callable[[list[Lane], str, Matches], Pick | None]


def matches(**blocks: int) -> dict[str, Match]:
    """So many of ten blocks, by the worker's name."""
    return {f"{name}.1": Match(count, 10) for name, count in blocks.items()}


@st.composite
def any_matches(draw: st.DrawFn) -> dict[str, Match]:
    found = draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 10)))
    return {f"{n}.1": Match(at, 10, at, draw(st.booleans())) for n, at in found.items()}


def chosen(pick: Pick | None) -> str:
    return pick.lane.name if pick else "-"


@pytest.mark.parametrize("policy", AFFINE)
@given(any_lanes(), st.sampled_from(["", "a", "c", "f"]), any_matches())
def test_affinity_chooses_an_open_lane_where_there_is_one(
    policy: Affine, lanes: list[Lane], last: str, found: Matches
) -> None:
    pick = policy(lanes, last, found)

    assert (pick is not None) == any(one.is_open for one in lanes)
    assert pick is None or pick.lane.is_open
    assert pick == policy(lanes, last, found), "the same again"


@given(any_lanes(), st.sampled_from(["", "a", "c", "f"]), any_matches())
def test_affinity_stays_near_the_emptiest_lane(
    lanes: list[Lane], last: str, found: Matches
) -> None:
    pick = prefix_affinity(lanes, last, found)
    if pick is None or pick.lane == least_loaded(lanes, last):
        return

    emptiest = min(one.load for one in lanes if one.is_open)
    assert pick.lane.load <= max(emptiest + NEAR_REQUESTS, 1.25 * emptiest)


class TestPrefixAffinity:
    def test_affinity_prefers_the_longest_prefix(self) -> None:
        lanes = [lane(name, 1, 9) for name in "abc"]

        assert chosen(prefix_affinity(lanes, "", matches(a=4, b=9, c=5))) == "b"

    def test_of_equal_prefixes_affinity_prefers_the_emptier_lane(self) -> None:
        lanes = [lane("a", 3, 9), lane("b", 1, 9)]

        assert chosen(prefix_affinity(lanes, "", matches(a=5, b=5))) == "b"

    def test_a_session_returns_to_its_worker(self) -> None:
        lanes = [lane(name, 1, 9) for name in "abc"]

        pick = prefix_affinity(lanes, "", {"c.1": Match(has_session=True)})

        assert pick == Pick(lanes[2], "its session was there")

    @pytest.mark.parametrize(
        ("lanes", "found", "why"),
        [
            ([lane("a", 1, 9, work=50), lane("b", 1, 9)], {}, "no worker has its prefix"),
            (
                [lane("a", 1 + NEAR_REQUESTS, 99), lane("b", 0, 99)],
                matches(a=10),
                "the worker with its prefix is busier",
            ),
            # A far fuller third, and a prefix at one of the others
            (
                [lane("a", 0, 999, work=9), lane("b", 0, 999), lane("c", 65, 999)],
                matches(a=10),
                "the load is lopsided",
            ),
        ],
    )
    def test_affinity_is_least_loaded(self, lanes: list[Lane], found: Matches, why: str) -> None:
        assert prefix_affinity(lanes, "", found) == Pick(lanes[1], f"least_loaded since {why}")

    def test_a_short_common_prefix_is_no_match(self) -> None:
        # Given a worker with a prefix that is too short to count
        lanes = [lane("a", 1, 9, work=50), lane("b", 1, 9, work=10)]

        assert chosen(prefix_affinity(lanes, "", matches(a=int(10 * LEAST_MATCH) - 1))) == "b"

    def test_the_guard_needs_the_difference_and_the_ratio(self) -> None:
        most = LOPSIDED_REQUESTS

        assert not is_lopsided([lane("a", 0, 999), lane("b", most, 999)])
        assert is_lopsided([lane("a", 0, 999), lane("b", most + 1, 999)])
        assert not is_lopsided([lane("a", 500, 999), lane("b", 500 + most + 1, 999)])
        assert not is_lopsided([])

    def test_a_pick_has_its_reason(self) -> None:
        found = {"a.1": Match(9, 10, has_session=True), "b.1": Match(5, 10)}

        pick = prefix_affinity([lane("a"), lane("b")], "", found)

        assert pick.why == "its session was there, 9 of 10 blocks of its prompt were there"

    def test_one_prefix_for_all_does_not_starve_other_workers(self) -> None:
        # Given a prefix of all requests, at first on one worker only
        lanes, given_to, known = [lane(name, 0, 99) for name in "abc"], [], {"a"}
        for _ in range(60):
            pick = prefix_affinity(lanes, "", matches(**dict.fromkeys(known, 10)))
            at = lanes.index(pick.lane)
            lanes[at] = lane(pick.lane.name, pick.lane.load + 1, 99)
            known.add(pick.lane.name)
            given_to.append(pick.lane.name)

        assert all(given_to.count(name) == 20 for name in "abc")


class TestMegatron:
    def test_megatrons_score(self) -> None:
        # Given half a prompt more on a worker that is nearly half as full again
        lanes = [lane("a", 4, 10), lane("b", 0, 10)]

        assert chosen(megatron(lanes, "", matches(a=5))) == "a"
        assert chosen(megatron(lanes, "", matches(a=3))) == "b"

    def test_ties_go_to_the_latest_match_and_then_to_the_first_name(self) -> None:
        lanes = [lane(name, 0, 9) for name in "abc"]

        assert chosen(megatron(lanes, "", {"b.1": Match(5, 10, 1), "c.1": Match(5, 10, 2)})) == "c"
        assert chosen(megatron(lanes, "a", matches(b=5, c=5))) == "b"

    def test_without_a_match_megatron_chooses_the_fewest_requests(self) -> None:
        assert chosen(megatron([lane("a", 1, 9), lane("b", 0, 9)], "", {})) == "b"
