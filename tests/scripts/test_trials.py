"""dispatch.lua, rescue.lua and acquit.lua: suspects on trial in a group on one lane."""

from __future__ import annotations

import pytest

from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.scripts.answers import Dispatched, Published


def put_on_trial(yard: PlayedYard, worker: str, count: int) -> list[QueuedRequest]:
    """Dispatch a group of so many suspects onto a worker's lane."""
    group = [yard.submit() for _ in range(count)]
    codes = yard.scripts.dispatch(yard.token, [one.to(worker, on_trial=True) for one in group])
    assert codes == [Dispatched.DISPATCHED] * count
    return group


def names(group: list[QueuedRequest]) -> list[tuple[str, str]]:
    return [(one.request.client, one.request.id) for one in group]


def crash(yard: PlayedYard, worker: str, trials: list[int | None]) -> None:
    yard.scripts.retire(worker, "crashed", "signal 11")
    assert yard.rescue(worker, trials) == 0


class TestDispatch:
    def test_mark_has_first_entry_and_size_of_the_group(
        self, yard: PlayedYard, worker: str
    ) -> None:
        before = yard.assign(worker)

        put_on_trial(yard, worker, 3)

        lane = [one.entry for one in yard.lane(worker)]
        assert lane[0] == before.entry
        assert yard.alone(worker) == f"{lane[1]}+3"

    def test_lane_of_a_group_is_full_for_other_suspects(
        self, yard: PlayedYard, worker: str
    ) -> None:
        put_on_trial(yard, worker, 2)
        second, alone = yard.submit(), yard.submit()
        moves = [second.to(worker, on_trial=True), alone.to(worker, alone=True)]

        assert yard.scripts.dispatch(yard.token, moves) == [Dispatched.FULL] * 2

        assert len(yard.lane(worker)) == 2

    def test_lane_of_a_lone_suspect_is_full_for_a_group(
        self, yard: PlayedYard, worker: str
    ) -> None:
        alone = yard.assign(worker, alone=True)

        codes = yard.scripts.dispatch(yard.token, [yard.submit().to(worker, on_trial=True)])

        assert codes == [Dispatched.FULL]
        assert yard.alone(worker) == alone.entry

    def test_group_gets_no_more_than_the_places_of_a_lane(
        self, yard: PlayedYard, worker: str
    ) -> None:
        moves = [yard.submit().to(worker, 2, on_trial=True) for _ in range(3)]

        codes = yard.scripts.dispatch(yard.token, moves)

        assert codes == [Dispatched.DISPATCHED, Dispatched.DISPATCHED, Dispatched.FULL]
        assert yard.alone(worker) == f"{yard.lane(worker)[0].entry}+2"

    def test_result_of_a_member_does_not_end_the_trial(self, yard: PlayedYard, worker: str) -> None:
        put_on_trial(yard, worker, 2)
        mark, first = yard.alone(worker), yard.lane(worker)[0]

        assert yard.finish(worker, first) is Published.PUBLISHED

        assert yard.alone(worker) == mark


class TestRescue:
    def test_rescue_notes_the_group_size_of_suspects_only(
        self, yard: PlayedYard, worker: str
    ) -> None:
        held = [yard.assign(worker) for _ in range(2)]

        crash(yard, worker, [16, None])

        suspect, other = (yard.ledger(one.request) for one in held)
        assert (suspect["trial"], suspect["suspected"], suspect["crashes"]) == ("16", "1", "1")
        assert not {"trial", "suspected", "crashes", "reason"} & other.keys()
        retries = [fields for _, fields in yard.intake("retry")]
        assert [fields.get(b"trial") for fields in retries] == [b"16", None]

    @pytest.mark.parametrize("why", ["lost", "left"])
    def test_loss_without_a_crash_leaves_the_group_size(
        self, yard: PlayedYard, worker: str, why
    ) -> None:
        held = [yard.assign(worker)]
        crash(yard, worker, [16])
        worker = yard.worker()
        again = yard.waiting(held[0].request)
        yard.scripts.dispatch(yard.token, [again.to(worker, on_trial=True)])
        yard.scripts.retire(worker, why, "signal 9")

        yard.rescue(worker, [4])

        ledger = yard.ledger(held[0].request)
        assert (ledger["trial"], ledger["suspected"]) == ("16", "1")
        assert yard.alone(worker) is None

    def test_suspicion_after_an_acquittal_is_a_relapse(self, yard: PlayedYard, worker: str) -> None:
        request = yard.assign(worker).request
        crash(yard, worker, [1])
        for relapses in (1, 2):
            worker = yard.worker()
            move = yard.waiting(request).to(worker, on_trial=True)
            yard.scripts.dispatch(yard.token, [move])
            mark = yard.alone(worker) or ""
            members = [(request.client, request.id)]
            yard.scripts.acquit(yard.token, worker, mark, members, keep=False)
            crash(yard, worker, [1])

            ledger = yard.ledger(request)
            assert (ledger["relapsed"], ledger["trial"]) == (str(relapses), "1")

    def test_suspicion_during_a_trial_is_no_relapse(self, yard: PlayedYard, worker: str) -> None:
        request = yard.assign(worker).request
        crash(yard, worker, [4])
        worker = yard.worker()
        yard.scripts.dispatch(yard.token, [yard.waiting(request).to(worker, on_trial=True)])

        crash(yard, worker, [1])

        ledger = yard.ledger(request)
        assert "relapsed" not in ledger
        assert (ledger["trial"], ledger["suspected"]) == ("1", "2")
        assert "crashed_alone" not in ledger


class TestAcquit:
    @pytest.mark.parametrize("keep", [True, False])
    def test_acquit_frees_the_members_and_opens_the_lane(
        self, yard: PlayedYard, worker: str, keep: bool
    ) -> None:
        group = put_on_trial(yard, worker, 2)
        for one in group:
            yard.connection.hset(yard.keys.ledger("anon", one.request.id), "trial", 8)
        mark = yard.alone(worker) or ""

        code = yard.scripts.acquit(yard.token, worker, mark, names(group), keep=keep)

        assert code
        assert not any("trial" in yard.ledger(one.request) for one in group)
        assert yard.alone(worker) == ("-" if keep else None)
        put_on_trial(yard, worker, 1)

    def test_acquit_does_not_touch_requests_that_left_the_lane(
        self, yard: PlayedYard, worker: str
    ) -> None:
        (one,) = put_on_trial(yard, worker, 1)
        mark, entry = yard.alone(worker) or "", yard.lane(worker)[0]
        yard.scripts.hand_back(worker, entry, 0, "x")
        yard.connection.hset(yard.keys.ledger("anon", one.request.id), "trial", 8)

        assert yard.scripts.acquit(yard.token, worker, mark, names([one]), keep=False) == 1

        assert yard.ledger(one.request)["trial"] == "8"

    def test_acquit_leaves_another_mark(self, yard: PlayedYard, worker: str) -> None:
        group = put_on_trial(yard, worker, 1)
        mark = yard.alone(worker)

        code = yard.scripts.acquit(yard.token, worker, "1-0+1", names(group), keep=False)

        assert not code
        assert yard.alone(worker) == mark
