"""dispatch.lua with `alone`: a suspect has its lane to itself until it leaves it."""

from __future__ import annotations

import pytest

from tests.support.yard import PlayedYard
from tokenyard.scripts.answers import Dispatched, Published


def test_suspect_gets_an_empty_lane_and_marks_it(yard: PlayedYard, worker: str) -> None:
    assignment = yard.assign(worker, alone=True)

    assert yard.alone(worker) == assignment.entry
    assert yard.lane(worker) == [assignment]


def test_lane_with_others_on_it_is_full_for_a_suspect(yard: PlayedYard, worker: str) -> None:
    yard.assign(worker)
    suspect = yard.submit()

    codes = yard.scripts.dispatch(yard.token, [suspect.to(worker, alone=True)])

    assert codes == [Dispatched.FULL]
    assert yard.alone(worker) is None
    assert [entry for entry, _ in yard.intake()] == [suspect.entry]


@pytest.mark.parametrize("alone", [True, False])
def test_quarantined_lane_is_full_for_all_others(
    yard: PlayedYard, worker: str, alone: bool
) -> None:
    suspect = yard.assign(worker, alone=True)
    waiting = yard.submit()

    codes = yard.scripts.dispatch(yard.token, [waiting.to(worker, alone=alone)])

    assert codes == [Dispatched.FULL]
    assert yard.alone(worker) == suspect.entry
    assert yard.lane(worker) == [suspect]


@pytest.mark.parametrize("suspect_is_first", [True, False])
def test_quarantine_holds_within_one_round(yard: PlayedYard, suspect_is_first: bool) -> None:
    worker, other = yard.worker("a"), yard.worker("b")
    suspect, plain, third = (yard.submit() for _ in range(3))
    moves = [suspect.to(worker, alone=True), plain.to(worker), third.to(other)]
    if not suspect_is_first:
        moves[:2] = moves[1::-1]

    codes = yard.scripts.dispatch(yard.token, moves)

    assert codes == [Dispatched.DISPATCHED, Dispatched.FULL, Dispatched.DISPATCHED]
    assert len(yard.lane(worker)) == 1
    assert (yard.alone(worker) is not None) is suspect_is_first


@pytest.mark.parametrize("how", ["completed", "failed", "expired", "handed back", "cancelled"])
def test_suspect_that_leaves_its_lane_opens_it(yard: PlayedYard, worker: str, how: str) -> None:
    suspect = yard.assign(worker, alone=True)
    match how:
        case "handed back":
            yard.scripts.hand_back(worker, suspect, 0, "x")
        case "cancelled":
            yard.scripts.cancel(suspect.request.client, suspect.request.id, "x")
        case _:
            assert yard.finish(worker, suspect, status=how) is Published.PUBLISHED

    assert yard.alone(worker) is None
    assert yard.assign(worker)


def test_result_that_is_stale_does_not_end_anothers_quarantine(
    yard: PlayedYard, worker: str
) -> None:
    first = yard.assign(worker)
    yard.scripts.hand_back(worker, first, 0, "x")
    suspect = yard.place(yard.waiting(first.request), worker, alone=True)

    assert yard.finish(worker, first) is Published.STALE
    assert yard.alone(worker) == suspect.entry


def test_result_for_a_deleted_ledger_ends_a_quarantine(yard: PlayedYard, worker: str) -> None:
    """Given a ledger that an operator deleted, I expect the lane to be empty and open again."""
    suspect = yard.assign(worker, alone=True)
    yard.connection.delete(yard.keys.ledger("anon", suspect.request.id))

    assert yard.finish(worker, suspect) is Published.STALE

    assert yard.alone(worker) is None
    assert yard.lane(worker) == []
    assert yard.replies(suspect.request) == []


def test_mark_of_a_deleted_entry_closes_no_lane(yard: PlayedYard, worker: str) -> None:
    suspect = yard.assign(worker, alone=True)
    yard.connection.xdel(yard.keys.lane(worker), suspect.entry)

    assert yard.assign(worker)


@pytest.mark.parametrize("why", ["left", "lost", "crashed"])
def test_end_of_the_worker_ends_a_quarantine(yard: PlayedYard, worker: str, why) -> None:
    yard.assign(worker, alone=True)
    yard.scripts.retire(worker, why)

    assert yard.rescue(worker) == 0

    assert yard.alone(worker) is None
    assert not yard.connection.hexists(yard.keys.departed, worker)
