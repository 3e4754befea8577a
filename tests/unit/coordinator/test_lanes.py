"""The lanes of a model: what is kept while they change is what a look at all of them would tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane

NAMES = "abcdef"
CHANGES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.booleans()), max_size=30
)  # which lane, its new load, whether it is quarantined


def lane(name: str, load: int = 0, limit: int = 3) -> Lane:
    return Lane(f"{name}.1", name, "sim", load, limit)


def walked(lanes: Lanes, last: str) -> Lane | None:
    """The next open lane, by walking over all of them."""
    behind = [one for one in lanes if one.name > last and one.is_open]
    return next(iter([*behind, *(one for one in lanes if one.is_open)]), None)


@given(CHANGES, st.sampled_from(["", "a", "c", "cc", "f"]))
def test_room_and_next_lane_follow_every_change(
    changes: list[tuple[int, int, bool]], last: str
) -> None:
    lanes = Lanes(map(lane, NAMES))
    for at, load, is_quarantined in changes:
        lanes.put(replace(lanes[at], load=load, is_quarantined=is_quarantined))

        assert lanes.room == sum(one.room for one in lanes)
        assert lanes.next_open(last) == walked(lanes, last)


def test_a_copy_of_lanes_is_independent() -> None:
    lanes = Lanes(map(lane, NAMES))
    twin = lanes.copy()

    for name in NAMES:
        twin.put(lane(name, load=3))

    assert twin.next_open("") is None
    assert twin.room == 0
    assert lanes.next_open("") == lane("a")
    assert lanes.room == 18


def test_lanes_are_in_the_order_of_their_names() -> None:
    assert [one.name for one in Lanes(map(lane, "bca"))] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "ask", [lambda lanes: lanes.next_open("a"), lambda lanes: lanes.named("b")]
)
def test_the_cost_of_a_request_does_not_grow_with_the_lanes(ask: Callable[[Lanes], object]) -> None:
    """Given very many lanes that are full, if one is chosen, I expect few to be looked at."""
    looks = 0

    class Watched(list[Lane]):
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += len(self)
            return super().__iter__()

    lanes = Lanes([lane(f"b{n}", load=3) for n in range(10_000)] + [lane("b")])
    lanes._lanes = Watched(lanes._lanes)

    assert ask(lanes) == lane("b")
    assert looks <= 2
