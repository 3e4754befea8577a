"""The policies: pure functions of the lanes, and of known prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.routing.lanes import Lanes
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
    vllm,
)

Plain = Callable[[Sequence[Lane], str], Lane | None]


def round_robin(lanes: Sequence[Lane], last: str) -> Lane | None:
    return Lanes(lanes).next_open(last)


PLAIN = [round_robin, least_loaded, vllm]


def lane(name: str, load: int = 0, limit: int = 2, *, work: int = 0, max_num_seqs: int = 1) -> Lane:
    return Lane(f"{name}.1", name, "sim", load, limit, work=work, max_num_seqs=max_num_seqs)


@st.composite
def any_lanes(draw: st.DrawFn) -> list[Lane]:
    """Up to six, some of them full, overfull or quarantined, in the order of their names."""
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=6))
    sizes, works = st.integers(0, 12), st.integers(0, 100_000)
    return [
        replace(
            lane(
                name,
                draw(sizes),
                draw(st.integers(1, 9)),
                work=draw(works),
                max_num_seqs=draw(sizes),
            ),
            is_quarantined=draw(st.booleans()),
        )
        for name in sorted(names)
    ]


def test_a_lane_is_found_by_the_name_of_its_worker() -> None:
    lanes = Lanes([lane("a"), lane("b", load=2)])

    assert lanes.named("a") == lanes[0]
    assert lanes.named("b") is None, "full"
    assert lanes.named("c") is None, "absent"


def test_of_two_incarnations_the_one_with_room_is_found() -> None:
    lanes = [Lane("a.1", "a", "sim", 2, 2), Lane("a.2", "a", "sim", 0, 2)]

    assert Lanes(lanes).named("a") == lanes[1]
    assert round_robin(lanes, "a") == lanes[1]


@pytest.mark.parametrize("policy", PLAIN)
@given(st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=6))
def test_equal_workers_get_equal_shares(policy: Plain, names: set[str]) -> None:
    lanes = [lane(name, limit=100) for name in sorted(names)]
    last, given_to = "", Counter[str]()
    for _ in range(3 * len(lanes)):
        chosen = policy(lanes, last)
        last = chosen.name
        given_to[last] += 1

    assert given_to == dict.fromkeys(names, 3)


@pytest.mark.parametrize("policy", PLAIN)
@given(any_lanes(), st.sampled_from(["", "a", "c", "f"]))
def test_least_loaded_chooses_an_open_lane_where_there_is_one(
    policy: Plain, lanes: list[Lane], last: str
) -> None:
    chosen = policy(lanes, last)

    assert (chosen is not None) == any(one.is_open for one in lanes)
    assert chosen is None or chosen.is_open
    assert chosen == policy(lanes, last), "the same again"


class TestLeastLoaded:
    @pytest.mark.parametrize(
        ("better", "worse"),
        [
            pytest.param((2, 9, 100), (3, 9, 100), id="fewer requests"),
            pytest.param((2, 9, 300), (2, 9, 8_000), id="fewer tokens"),
            pytest.param((4, 9, 400), (1, 9, 8_000), id="short requests beside a long one"),
            pytest.param((1, 9, 500), (8, 9, 400), id="one request beside many short ones"),
            pytest.param((5, 80, 500), (4, 8, 400), id="a larger worker"),
        ],
    )
    def test_least_loaded_prefers(
        self, better: tuple[int, int, int], worse: tuple[int, int, int]
    ) -> None:
        for names in ("ab", "ba"):
            lanes = [
                lane(name, load, limit, work=work)
                for name, (load, limit, work) in zip(names, (better, worse), strict=True)
            ]

            assert least_loaded(sorted(lanes, key=lambda one: one.name), "") == lanes[0]

    def test_no_worker_starves(self) -> None:
        # Given one worker that is busy forever, and requests that stay
        lanes = [lane("a", 1, 99, work=50_000), lane("b", 0, 99), lane("c", 0, 99)]
        given_to = Counter[str]()
        last = ""
        for _ in range(90):
            chosen = least_loaded(lanes, last)
            last = chosen.name
            given_to[last] += 1
            more = replace(chosen, load=chosen.load + 1, work=chosen.work + 100)
            lanes[lanes.index(chosen)] = more

        # I expect it to be spared, but the others to have the same share.
        assert given_to["b"] == given_to["c"] > given_to["a"]


def test_vllm_counts_waiting_requests_four_times() -> None:
    # Given five running requests, or two running and one waiting
    lanes = [lane("a", 5, 9, max_num_seqs=8), lane("b", 3, 9, max_num_seqs=2)]

    assert vllm(lanes, "") == lanes[0]
    assert vllm([lanes[1], replace(lanes[0], name="c", load=7)], "") == lanes[1]


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
