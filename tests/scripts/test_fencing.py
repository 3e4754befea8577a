"""The fences of scripts: nothing changes without the lead or a lease, or by the same call again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.builders import make_delta, make_result
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.control import Command
from tokenyard.protocol.wire import Assignment
from tokenyard.scripts.answers import (
    Answered,
    Dispatched,
    HandedBack,
    LostRequest,
    Publication,
    Published,
)
from tokenyard.scripts.calls import LostLeadership

LOAD = Command(verb="load", worker="w.1", model="adder")


def everything(yard: PlayedYard) -> dict[bytes, object]:
    """All keys of a yard with their values."""
    found = yard.connection.scan_iter(f"tokenyard:{{{yard.keys.yard}}}:*", count=1000)
    return {key: value_of(yard, key) for key in found}


def value_of(yard: PlayedYard, key: bytes) -> object:
    """What a key holds; the server dumps a hash in any order."""
    is_hash = yard.connection.type(key) == b"hash"
    return yard.connection.hgetall(key) if is_hash else yard.connection.dump(key)


def deltas(assignment: Assignment) -> list[Publication]:
    request_id = assignment.request.id
    return [Publication(assignment, make_delta(request_id, at, [at])) for at in range(2)]


def held(assignment: Assignment) -> tuple[str, str, str]:
    return assignment.entry, assignment.request.client, assignment.request.id


#: What only a leader does, with a waiting request and one that runs alone.
LEADS: dict[str, Callable[..., object]] = {
    "answer": lambda yard, waiting, _: yard.answer(waiting, dead="x"),
    "bury": lambda yard, waiting, _: yard.scripts.bury(yard.token, "normal", waiting.entry, "x"),
    "dispatch": lambda yard, waiting, _: yard.scripts.dispatch(yard.token, [waiting.to("w.1")] * 2),
    "rescue": lambda yard, _, alone: yard.scripts.rescue(yard.token, "w.1", [held(alone)]),
    "acquit": lambda yard, _, alone: yard.scripts.acquit(
        yard.token, "w.1", alone.entry, [held(alone)[1:]], keep=False
    ),
    "recognize": lambda yard, *_: yard.scripts.recognize(yard.token, "other", was_replica=True),
    "take_over": lambda yard, *_: yard.scripts.take_over(yard.token, {"models": "[]"}),
    "command": lambda yard, *_: yard.scripts.command(LOAD, yard.token),
    "record": lambda yard, *_: yard.scripts.record(yard.token, {"finished": 1}, 400),
}


@pytest.mark.parametrize("name", LEADS)
def test_a_former_leader_changes_nothing(
    yard: PlayedYard, worker: str, waiting: QueuedRequest, name: str
) -> None:
    alone = yard.assign(worker, alone=True)
    yard.expire(worker)
    yard.depose()
    before = everything(yard)

    with pytest.raises(LostLeadership):
        LEADS[name](yard, waiting, alone)
    assert everything(yard) == before


@pytest.fixture
def lost(yard: PlayedYard) -> LostRequest:
    """A request whose entry was deleted by hand."""
    waiting = yard.submit()
    yard.connection.xdel(yard.keys.intake("normal"), waiting.entry)
    name = waiting.request.client, waiting.request.id
    return LostRequest(*name, "waiting", "normal", waiting.entry, may_run=False)


def test_a_former_leader_ends_no_lost_request(yard: PlayedYard, lost: LostRequest) -> None:
    yard.depose()
    before = everything(yard)

    with pytest.raises(LostLeadership):
        yard.scripts.reconcile(yard.token, [lost], excess_tokens=1)
    assert everything(yard) == before


def test_a_lost_request_ends_once(yard: PlayedYard, lost: LostRequest) -> None:
    codes = yard.scripts.reconcile(yard.token, [lost, lost])

    assert codes == [True, False]


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
    yard: PlayedYard,
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
    yard: PlayedYard, worker: str, assignment: Assignment, how: str
) -> None:
    sender = yard.fence(worker, how)
    results = [Publication(assignment, make_result(assignment.request.id))] * 2
    before = everything(yard)

    assert yard.scripts.emit(sender, deltas(assignment)) == [Published.LEASE_LOST] * 2
    assert yard.scripts.finish(sender, results) == [Published.LEASE_LOST] * 2
    assert yard.scripts.hand_back(sender, assignment, 0, "x") is HandedBack.LEASE_LOST

    assert refusals(yard, assignment) == ("4", sender, "1", "result")
    forget_refusals(yard, assignment)
    assert everything(yard) == before


def refusals(yard: PlayedYard, assignment: Assignment) -> tuple[str, ...]:
    """What a ledger says of its fence: how often it refused, and the last worker, attempt, what."""
    request = assignment.request
    ledger = yard.keys.ledger(request.client, request.id)
    count, last = yard.connection.hmget(ledger, "refusals", "refused")
    at_ms, *words = last.decode().split(" ")
    seconds, _ = yard.connection.time()
    assert 0 <= seconds + 1 - int(at_ms) / 1000 < 60
    return (count.decode(), *words)


def forget_refusals(yard: PlayedYard, assignment: Assignment) -> None:
    request = assignment.request
    yard.connection.hdel(yard.keys.ledger(request.client, request.id), "refusals", "refused")


def write_late(yard: PlayedYard, worker: str, assignment: Assignment, what: str) -> Published:
    return (
        yard.emit(worker, assignment, [0]) if what == "tokens" else yard.finish(worker, assignment)
    )


@pytest.mark.parametrize("what", ["tokens", "result"])
@pytest.mark.parametrize("since", ["it waits", "it runs", "it ended"])
def test_an_earlier_attempt_changes_only_what_its_fence_notes(
    yard: PlayedYard, what: str, since: str
) -> None:
    one, two = yard.worker("one"), yard.worker("two")
    old = yard.assign(one)
    yard.lose(one)
    if since != "it waits":
        again = yard.place(yard.waiting(old.request), two)
        if since == "it ended":
            assert yard.finish(two, again) is Published.PUBLISHED
    one = yard.worker("one")
    before = everything(yard)

    assert write_late(yard, one, old, what) is Published.STALE

    assert refusals(yard, old) == ("1", one, "1", what)
    forget_refusals(yard, old)
    assert everything(yard) == before


@pytest.mark.parametrize("what", ["tokens", "result"])
def test_only_the_holder_of_the_attempt_publishes(yard: PlayedYard, what: str) -> None:
    one, two = yard.worker("one"), yard.worker("two")
    old = yard.assign(one)
    yard.lose(one)
    again = yard.place(yard.waiting(old.request), two)
    one = yard.worker("one")

    assert write_late(yard, two, old, what) is Published.STALE
    assert write_late(yard, one, again, what) is Published.STALE
    assert (yard.replies(old.request), yard.lane(two)) == ([], [again])
    assert write_late(yard, two, again, what) is Published.PUBLISHED


@pytest.mark.parametrize("what", ["tokens", "result"])
@pytest.mark.parametrize("held", [True, False])
def test_the_fence_notes_nothing_without_a_ledger(
    yard: PlayedYard, worker: str, assignment: Assignment, what: str, held: bool
) -> None:
    """A result that has expired stays forgotten."""
    request = assignment.request
    yard.connection.delete(yard.keys.ledger(request.client, request.id))

    code = write_late(yard, worker if held else "nobody.1", assignment, what)

    assert code is (Published.STALE if held else Published.LEASE_LOST)
    assert not yard.connection.exists(yard.keys.ledger(request.client, request.id))
    assert yard.replies(request) == []


@pytest.mark.parametrize("what", ["tokens", "result"])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_what_comes_after_the_end_of_its_own_attempt_changes_nothing(
    yard: PlayedYard, worker: str, assignment: Assignment, end: str, what: str, held: bool
) -> None:
    request = assignment.request
    if end == "finish":
        assert yard.finish(worker, assignment) is Published.PUBLISHED
    else:
        yard.scripts.cancel(request.client, request.id, "for a test")
    if not held:
        yard.fence(worker, "lost")
    before = everything(yard)

    code = write_late(yard, worker, assignment, what)

    assert code is Published.LEASE_LOST if not held else code is not Published.PUBLISHED
    assert everything(yard) == before


def test_a_ledger_keeps_one_refusal_and_their_number(
    yard: PlayedYard, assignment: Assignment
) -> None:
    for worker in ("gone.1", "gone.2"):
        for what in ("result", "tokens"):
            write_late(yard, worker, assignment, what)

    assert refusals(yard, assignment) == ("4", "gone.2", "1", "tokens")


def test_what_is_accepted_costs_no_command_for_the_fence(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    """Given a server that counts, I expect the ledger to be read once for each and written once."""

    def calls(name: str) -> int:
        return int(
            yard.connection.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"]
        )

    before = {name: calls(name) for name in ("hmget", "hset", "hincrby")}
    assert yard.scripts.emit(worker, deltas(assignment)) == [Published.PUBLISHED] * 2
    after_emit = {name: calls(name) - count for name, count in before.items()}
    write_late(yard, worker, assignment, "result")
    after = {name: calls(name) - count for name, count in before.items()}

    assert after_emit == {"hmget": 2, "hset": 0, "hincrby": 0}
    assert after == {"hmget": 3, "hset": 1, "hincrby": 0}
