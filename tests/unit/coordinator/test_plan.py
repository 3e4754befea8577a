"""The plan of one turn for one model: suspects alone, the others in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from coordinator.dispatch.plan import PlannedDispatch, make_plan
from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane, Pick
from coordinator.routing.queued_request import QueuedRequest, RoutingFeatures


def lane(
    name: str, load: int = 0, *, limit: int = 4, alone: bool = False, kept: bool = False
) -> Lane:
    return Lane(
        f"{name}.1", name, "m", load, limit, is_quarantined=alone, max_num_seqs=limit, is_kept=kept
    )


def queued(name: str, trial: int | None = None) -> QueuedRequest:
    work = RoutingFeatures(work=10)
    return QueuedRequest(
        intake="normal", entry=name, id=name, model="m", features=work, trial=trial
    )


def pick(chosen: Lane | None) -> Pick | None:
    return Pick(chosen, "for a test") if chosen else None


def plan(
    lanes: Sequence[Lane],
    *,
    suspects: Sequence[QueuedRequest] = (),
    others: Sequence[QueuedRequest] | Iterator[QueuedRequest] = (),
    most: int = 100,
) -> list[PlannedDispatch]:
    return make_plan(
        suspects,
        others,
        Lanes(lanes),
        choose=lambda _, candidates: pick(candidates.next_open("")),
        most=most,
    )


def placed(made: list[PlannedDispatch]) -> list[tuple[str, str, bool]]:
    return [(item.queued.id, item.lane.name, item.alone) for item in made]


def suspects(count: int, trial: int = 0) -> list[QueuedRequest]:
    return [queued(f"s{n}", trial) for n in range(count)]


def groups(made: list[PlannedDispatch]) -> dict[str, int]:
    """How many are on trial on each lane."""
    return dict(Counter(item.lane.name for item in made if item.on_trial))


def others(count: int) -> list[QueuedRequest]:
    return [queued(f"r{n}") for n in range(count)]


class TestSuspects:
    def test_a_suspect_runs_alone_on_an_empty_lane(self) -> None:
        made = plan([lane("a"), lane("b")], suspects=suspects(1), others=others(1))

        assert placed(made) == [("s0", "a", True), ("r0", "b", False)]

    def test_the_emptiest_lane_is_kept_for_a_suspect_until_it_is_empty(self) -> None:
        lanes = [lane("a", 2), lane("b", 1), lane("c", 3)]

        made = plan(lanes, suspects=suspects(1), others=others(9))

        assert {name for _, name, _ in placed(made)} == {"a", "c"}
        assert len(made) == 3

    @pytest.mark.parametrize(("lanes", "kept"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
    def test_suspects_take_at_most_half_of_the_lanes(self, lanes: int, kept: int) -> None:
        made = plan([lane(f"w{n}") for n in range(lanes)], suspects=suspects(9), others=others(99))

        assert sum(alone for _, _, alone in placed(made)) == kept
        assert sum(not alone for _, _, alone in placed(made)) == (lanes - kept) * 4

    def test_running_suspects_count_toward_half_of_the_lanes(self) -> None:
        lanes = [lane("a", 1, alone=True), lane("b", 1, alone=True), lane("c"), lane("d")]

        made = plan(lanes, suspects=suspects(2), others=others(99))

        assert {name for _, name, _ in placed(made)} == {"c", "d"}
        assert not any(alone for _, _, alone in placed(made))

    def test_nothing_is_placed_on_a_quarantined_lane(self) -> None:
        assert plan([lane("a", 1, alone=True)], suspects=suspects(1), others=others(3)) == []

    def test_on_the_only_lane_earlier_requests_go_before_a_suspect(self) -> None:
        older, same = queued("older"), queued("same")
        late = replace(queued("s", 0), since_ms=5.0)
        queue = [replace(older, since_ms=4.0), replace(same, since_ms=5.0)]

        assert placed(plan([lane("a", 1)], suspects=[late], others=queue)) == [
            ("older", "a", False)
        ]
        assert placed(plan([lane("a", 0)], suspects=[late], others=queue)) == [("s", "a", True)]
        assert not placed(plan([lane("a", 1), lane("b", 4)], suspects=[late], others=queue))

    def test_a_suspect_waits_where_there_is_no_lane(self) -> None:
        assert plan([], suspects=suspects(1), others=others(1)) == []


class TestGroups:
    def test_a_group_of_suspects_shares_an_empty_lane(self) -> None:
        made = plan([lane("a", limit=9), lane("b", 1)], suspects=suspects(6, 4), others=others(9))

        assert groups(made) == {"a": 4}
        assert {item.lane.name for item in made if not item.on_trial} == {"b"}
        assert made[0].why == "on trial with 3 other suspects"

    def test_no_group_is_larger_than_a_member_allows(self) -> None:
        mixed = [*suspects(2, 4), queued("t", 2), queued("u", 2)]

        assert groups(plan([lane("a", limit=9)], suspects=mixed)) == {"a": 2}

    def test_a_group_runs_beside_one_that_has_survived(self) -> None:
        lanes = [lane("a", 5, limit=9, kept=True), lane("b", 0, limit=2), lane("c", 1, limit=9)]

        made = plan(lanes, suspects=suspects(8, 8))

        assert groups(made) == {"a": 4}, "no more than the engine runs at once"

    def test_a_group_never_runs_beside_unsuspected_requests(self) -> None:
        made = plan([lane("a", 2), lane("b", 1)], suspects=suspects(4, 4), others=others(9))

        assert groups(made) == {}
        assert {item.lane.name for item in made} == {"a"}, "the emptiest is kept until it is dry"

    def test_a_lane_on_trial_takes_no_second_group(self) -> None:
        lanes = [lane("a", 1, alone=True), lane("b"), lane("c"), lane("d")]

        assert groups(plan(lanes, suspects=suspects(8, 2))) == {"b": 2}

    @pytest.mark.parametrize(
        ("share", "count"), [(0.01, 1), (0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)]
    )
    def test_groups_use_several_lanes_within_the_bound(self, share: float, count: int) -> None:
        lanes = Lanes([lane(f"w{n}") for n in range(4)])

        made = make_plan(
            suspects(99, 2), [], lanes, choose=lambda *_: None, most=99, trial_share=share
        )

        assert list(groups(made).values()) == [2] * count

    def test_groups_go_before_suspects_that_must_run_alone(self) -> None:
        mixed = [*suspects(1), *[queued(f"g{n}", 2) for n in range(2)]]

        assert groups(plan([lane("a")], suspects=mixed)) == {"a": 2}

    def test_others_avoid_a_lane_kept_for_suspects(self) -> None:
        lanes = [lane("a", 4, kept=True), lane("b")]

        made = plan(lanes, suspects=suspects(3, 3), others=others(9))
        assert {item.lane.name for item in made if not item.on_trial} == set()
        made = plan([lane("a", 3, kept=True)], others=others(9))
        assert {item.lane.name for item in made} == {"a"}


class TestOthers:
    def test_a_plan_places_no_more_than_the_lanes_take(self) -> None:
        made = plan([lane("a", 3), lane("b", 2)], others=others(9))

        assert placed(made) == [("r0", "a", False), ("r1", "b", False), ("r2", "b", False)]

    def test_a_plan_is_no_larger_than_a_batch(self) -> None:
        assert len(plan([lane("a", limit=99)], others=others(9), most=5)) == 5
        assert (
            len(plan([lane(n) for n in "abc"], suspects=suspects(1), others=others(9), most=5)) == 5
        )

    def test_a_plan_reads_no_more_requests_than_have_room(self) -> None:
        # Given room for three and far more requests
        queue = iter(others(1000))

        assert len(plan([lane("a", 1)], others=queue)) == 3
        assert next(queue).id == "r4"

    def test_a_plan_counts_its_own_requests_on_the_lanes(self) -> None:
        seen = [item.lane for item in plan([lane("a")], others=others(3))]

        assert [(one.load, one.work) for one in seen] == [(0, 0), (1, 10), (2, 20)]

    def test_a_request_that_has_to_wait_holds_back_those_behind_it(self) -> None:
        # Given a policy under which the second request belongs to a full lane
        lanes = [lane("a"), lane("b", 4)]

        made = make_plan(
            [],
            others(3),
            Lanes(lanes),
            choose=lambda one, _: None if one.id == "r1" else pick(lanes[0]),
            most=9,
        )

        assert placed(made) == [("r0", "a", False)]
