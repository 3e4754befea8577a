"""The policies: pure functions of what is known."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies import Lane, named, round_robin


def lane(name: str, load: int = 0, limit: int = 2) -> Lane:
    return Lane(f"{name}.1", name, "sim", load, limit)


def test_the_turn_goes_round() -> None:
    lanes = [lane("a"), lane("b"), lane("c")]

    assert round_robin(lanes, "") == lanes[0]
    assert round_robin(lanes, "a") == lanes[1]
    assert round_robin(lanes, "c") == lanes[0]


def test_a_full_lane_is_passed_over() -> None:
    lanes = [lane("a"), lane("b", load=2), lane("c")]

    assert round_robin(lanes, "a") == lanes[2]


def test_the_turn_goes_on_behind_a_worker_that_has_left() -> None:
    lanes = [lane("a"), lane("c")]

    assert round_robin(lanes, "b") == lanes[1]


def test_all_full() -> None:
    assert round_robin([lane("a", load=2), lane("b", load=3)], "a") is None
    assert round_robin([], "a") is None


def test_named_lane() -> None:
    lanes = [lane("a"), lane("b", load=2)]

    assert named(lanes, "a") == lanes[0]
    assert named(lanes, "b") is None, "full"
    assert named(lanes, "c") is None, "absent"
    assert named(lanes, None) is None


def test_of_two_incarnations_the_one_with_room_counts() -> None:
    lanes = [Lane("a.1", "a", "sim", 2, 2), Lane("a.2", "a", "sim", 0, 2)]

    assert named(lanes, "a") == lanes[1]
    assert round_robin(lanes, "a") == lanes[1]


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=6))
def test_everybody_gets_the_same_share(names: set[str]) -> None:
    lanes = [lane(name, limit=100) for name in sorted(names)]
    last, given_to = "", Counter[str]()
    for _ in range(3 * len(lanes)):
        chosen = round_robin(lanes, last)
        assert chosen
        last = chosen.name
        given_to[last] += 1

    assert given_to == dict.fromkeys(names, 3)
