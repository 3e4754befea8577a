"""The policies: pure functions of the lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane, least_loaded, vllm

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

    def test_ties_take_turns(self) -> None:
        lanes = [lane("a"), lane("b"), lane("c", 1, work=9)]

        assert least_loaded(lanes, "") == lanes[0]
        assert least_loaded(lanes, "a") == lanes[1]
        assert least_loaded(lanes, "b") == lanes[0]

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
