"""The plan of one turn: suspects alone, pauses, deadlines, order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.history import FRESH, History
from coordinator.intake import Waiting
from coordinator.plan import Plan, Planner
from coordinator.policies import Lane, round_robin
from tests.support.builders import make_request

NOW_MS = 1_000_000


def lane(
    name: str, load: int = 0, *, model: str = "m", limit: int = 4, alone: bool = False
) -> Lane:
    return Lane(f"{name}.1", name, model, load, limit, is_quarantined=alone)


def waiting(
    name: str,
    *,
    suspect: bool = False,
    model: str = "m",
    deadline_ms: int | None = None,
    not_before_ms: int = 0,
) -> Waiting:
    history = History(not_before_ms=not_before_ms) if not_before_ms else FRESH
    request = make_request(name, model=model, deadline_ms=deadline_ms)
    return Waiting("normal", name, request, history, suspect)


def plan(
    held: Sequence[Waiting], lanes: Sequence[Lane], *, most: int = 100, strict_order: bool = False
) -> Plan:
    planner = Planner(
        lanes,
        model_of=lambda one: one.request.model,
        choose=lambda _, candidates: round_robin(candidates, ""),
        now_ms=NOW_MS,
        most=most,
        strict_order=strict_order,
    )
    return planner.make(held)


def placed(made: Plan) -> list[tuple[str, str, bool]]:
    return [(item.waiting.request.id, item.lane.name, item.alone) for item in made.placed]


def suspects(count: int) -> list[Waiting]:
    return [waiting(f"s{n}", suspect=True) for n in range(count)]


def others(count: int) -> list[Waiting]:
    return [waiting(f"r{n}") for n in range(count)]


class TestSuspects:
    def test_alone_on_an_empty_lane(self) -> None:
        made = plan([*others(1), *suspects(1)], [lane("a"), lane("b")])

        assert placed(made) == [("s0", "a", True), ("r0", "b", False)]

    def test_the_emptiest_lane_is_kept_free_until_it_has_run_dry(self) -> None:
        made = plan([*suspects(1), *others(9)], [lane("a", 2), lane("b", 1), lane("c", 3)])

        assert {name for _, name, _ in placed(made)} == {"a", "c"}
        assert len(made.placed) == 3

    @pytest.mark.parametrize(("lanes", "kept"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
    def test_at_most_half_of_the_lanes(self, lanes: int, kept: int) -> None:
        made = plan([*suspects(9), *others(99)], [lane(f"w{n}") for n in range(lanes)])

        assert sum(alone for _, _, alone in placed(made)) == kept
        assert sum(not alone for _, _, alone in placed(made)) == (lanes - kept) * 4

    def test_those_that_run_already_are_part_of_that_half(self) -> None:
        lanes = [lane("a", 1, alone=True), lane("b", 1, alone=True), lane("c"), lane("d")]

        made = plan([*suspects(2), *others(99)], lanes)

        assert {name for _, name, _ in placed(made)} == {"c", "d"}
        assert not any(alone for _, _, alone in placed(made))

    def test_nothing_comes_onto_a_quarantined_lane(self) -> None:
        made = plan([*suspects(1), *others(3)], [lane("a", 1, alone=True)])

        assert made == Plan()

    def test_each_model_has_its_own(self) -> None:
        held = [waiting("x", suspect=True), waiting("y", suspect=True, model="n"), waiting("z")]

        made = plan(held, [lane("a"), lane("b"), lane("c", model="n")])

        assert placed(made) == [("x", "a", True), ("y", "c", True), ("z", "b", False)]

    def test_without_a_lane_of_its_model_it_waits(self) -> None:
        assert plan([waiting("x", suspect=True, model="n")], [lane("a")]).placed == []


class TestTime:
    def test_late_ones_are_not_placed(self) -> None:
        late = waiting("late", deadline_ms=NOW_MS)
        suspect = waiting("s", suspect=True, deadline_ms=NOW_MS - 1)

        made = plan([late, suspect, waiting("r")], [lane("a")])

        assert made.late == [late, suspect]
        assert placed(made) == [("r", "a", False)]

    def test_pauses_are_kept_and_the_first_end_is_known(self) -> None:
        held = [waiting(f"r{n}", not_before_ms=NOW_MS + n) for n in (300, 1, 0, 20)]

        made = plan(held, [lane("a")])

        assert placed(made) == [("r0", "a", False)]
        assert made.next_ms == NOW_MS + 1

    def test_a_deadline_is_a_time_to_look_again(self) -> None:
        held = [waiting("r", deadline_ms=NOW_MS + 50), waiting("s", not_before_ms=NOW_MS + 90)]

        assert plan(held, []).next_ms == NOW_MS + 50

    def test_a_deadline_ends_a_pause(self) -> None:
        held = [waiting("r", deadline_ms=NOW_MS, not_before_ms=NOW_MS + 90)]

        assert plan(held, [lane("a")]).late == held

    def test_otherwise_there_is_no_such_time(self) -> None:
        assert plan(others(3), []).next_ms is None


class TestOthers:
    def test_no_more_than_the_lanes_hold(self) -> None:
        made = plan(others(9), [lane("a", 3), lane("b", 2)])

        assert placed(made) == [("r0", "a", False), ("r1", "b", False), ("r2", "b", False)]

    def test_no_more_than_a_batch(self) -> None:
        assert len(plan(others(9), [lane("a", limit=99)], most=5).placed) == 5

    def test_a_full_model_does_not_hold_back_another(self) -> None:
        held = [waiting("x"), waiting("y", model="n")]
        lanes = [lane("a", 4), lane("b", model="n")]

        assert placed(plan(held, lanes)) == [("y", "b", False)]
        assert plan(held, lanes, strict_order=True).placed == []

    def test_lanes_are_seen_as_they_fill(self) -> None:
        assert [item.lane.load for item in plan(others(3), [lane("a")]).placed] == [0, 1, 2]
