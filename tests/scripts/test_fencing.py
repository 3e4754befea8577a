"""The fences of scripts: nothing changes without the lead or a lease, or by the same call again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.builders import make_delta, make_result
from tests.support.yard import QueuedRequest, Yard
from tokenyard.protocol.commands import Command
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts import (
    ACQUIT_NOT_LEADER,
    RESCUE_NOT_LEADER,
    Answered,
    Dispatched,
    HandedBack,
    LostRequest,
    Publication,
    Published,
    Reconciled,
)

LOAD = Command(verb="load", worker="w.1", model="adder")


def everything(yard: Yard) -> dict[bytes, bytes]:
    """All keys of a yard with their values."""
    found = yard.connection.scan_iter(f"tokenyard:{{{yard.keys.yard}}}:*", count=1000)
    return {key: yard.connection.dump(key) for key in found}


def deltas(assignment: Assignment) -> list[Publication]:
    request_id = assignment.request.id
    return [Publication(assignment, make_delta(request_id, at, [at])) for at in range(2)]


def held(assignment: Assignment) -> tuple[str, str, str]:
    return assignment.entry, assignment.request.client, assignment.request.id


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda yard, waiting, _: yard.answer(waiting), Answered.NOT_LEADER),
        (
            lambda yard, waiting, _: yard.scripts.bury(yard.token, "normal", waiting.entry, "x"),
            Answered.NOT_LEADER,
        ),
        (
            lambda yard, waiting, _: yard.scripts.dispatch(yard.token, [waiting.to("w.1")] * 2),
            [Dispatched.NOT_LEADER] * 2,
        ),
        (
            lambda yard, _, alone: yard.scripts.rescue(yard.token, "w.1", [held(alone)]),
            RESCUE_NOT_LEADER,
        ),
        (
            lambda yard, _, alone: yard.scripts.acquit(
                yard.token, "w.1", alone.entry, [held(alone)[1:]], keep=False
            ),
            ACQUIT_NOT_LEADER,
        ),
        (lambda yard, *_: yard.scripts.recognize(yard.token, "other", was_replica=True), -1),
        (lambda yard, *_: yard.scripts.take_over(yard.token, {"models": "[]"}), False),
        (lambda yard, *_: yard.scripts.command(LOAD, yard.token), None),
    ],
    ids=["answer", "bury", "dispatch", "rescue", "acquit", "recognize", "take_over", "command"],
)
def test_a_former_leader_changes_nothing(
    yard: Yard, worker: str, waiting: QueuedRequest, call: Callable[..., object], code: object
) -> None:
    alone = yard.assign(worker, alone=True)
    yard.expire(worker)
    yard.depose()
    before = everything(yard)

    assert call(yard, waiting, alone) == code
    assert everything(yard) == before


@pytest.fixture
def lost(yard: Yard) -> LostRequest:
    """A request whose entry was deleted by hand."""
    waiting = yard.submit()
    yard.connection.xdel(yard.keys.intake("normal"), waiting.entry)
    name = waiting.request.client, waiting.request.id
    return LostRequest(*name, "waiting", "normal", waiting.entry, may_run=False)


def test_a_former_leader_ends_no_lost_request(yard: Yard, lost: LostRequest) -> None:
    yard.depose()
    before = everything(yard)

    codes = yard.scripts.reconcile(yard.token, [lost], excess_tokens=1)

    assert codes == [Reconciled.NOT_LEADER]
    assert everything(yard) == before


def test_a_lost_request_ends_once(yard: Yard, lost: LostRequest) -> None:
    codes = yard.scripts.reconcile(yard.token, [lost, lost])

    assert codes == [Reconciled.ENDED, Reconciled.STAYS]


@pytest.mark.parametrize(
    ("call", "first", "again"),
    [
        (lambda yard, waiting, _: yard.answer(waiting), Answered.DONE, Answered.GONE),
        (
            lambda yard, waiting, _: yard.scripts.bury(yard.token, "normal", waiting.entry, "x"),
            Answered.DONE,
            Answered.GONE,
        ),
        (
            lambda yard, waiting, _: yard.scripts.dispatch(yard.token, [waiting.to("w.1")]),
            [Dispatched.DISPATCHED],
            [Dispatched.GONE],
        ),
        (
            lambda yard, _, runs: yard.scripts.emit("w.1", deltas(runs)),
            [Published.PUBLISHED] * 2,
            [Published.REPEATED] * 2,
        ),
    ],
    ids=["answer", "bury", "dispatch", "emit"],
)
def test_a_call_repeated_after_a_lost_answer_changes_nothing(
    yard: Yard,
    waiting: QueuedRequest,
    assignment: Assignment,
    call: Callable[..., object],
    first: object,
    again: object,
) -> None:
    assert call(yard, waiting, assignment) == first
    before = everything(yard)

    assert call(yard, waiting, assignment) == again
    assert everything(yard) == before


@pytest.mark.parametrize("how", ["lost", "rescued", "unknown"])
def test_a_worker_without_a_lease_changes_nothing(
    yard: Yard, worker: str, assignment: Assignment, how: str
) -> None:
    sender = yard.fence(worker, how)
    results = [Publication(assignment, make_result(assignment.request.id))] * 2
    before = everything(yard)

    assert yard.scripts.emit(sender, deltas(assignment)) == [Published.LEASE_LOST] * 2
    assert yard.scripts.finish(sender, results) == [Published.LEASE_LOST] * 2
    assert yard.scripts.hand_back(sender, assignment, 0, "x") is HandedBack.LEASE_LOST
    assert everything(yard) == before
