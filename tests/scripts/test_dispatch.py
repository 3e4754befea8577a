"""dispatch.lua: entries move from intakes onto lanes, and are always in exactly one place."""

from __future__ import annotations

import pytest

from tests.support.builders import make_assignment, make_request
from tests.support.yard import PlayedYard, QueuedRequest, requests
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import MAX_FIELDS, Request, request_fields
from tokenyard.scripts.answers import Dispatched, Published

HIGHEST = "18446744073709551615-18446744073709551615"


def test_entry_moves_whole_with_its_fencing_token(yard: PlayedYard, worker: str) -> None:
    waiting = yard.submit(make_request(model="adder", stream=True))

    assert yard.scripts.dispatch(yard.token, [waiting.to(worker)]) == [Dispatched.DISPATCHED]

    (assignment,) = yard.lane(worker)
    assert assignment.request == waiting.request
    assert (assignment.sid, assignment.attempt) == (f"normal/{waiting.entry}", 1)
    assert (assignment.crashes, assignment.published) == (0, b"")
    assert yard.intake() == []
    assert yard.ledger(waiting.request) == {
        "state": "assigned",
        "sid": f"normal/{waiting.entry}",
        "entry": assignment.entry,
        "worker": worker,
        "attempt": "1",
        "digest": request_digest(waiting.request),
        "t1": f"{assignment.entry} {worker} the test says so",
    }


def test_round_without_moves_changes_nothing(yard: PlayedYard) -> None:
    assert yard.scripts.dispatch(yard.token, []) == []


def test_entry_named_twice_in_one_round_moves_once(yard: PlayedYard) -> None:
    one, two = yard.worker("one"), yard.worker("two")
    waiting = yard.submit()

    codes = yard.scripts.dispatch(yard.token, [waiting.to(one), waiting.to(two)])

    assert codes == [Dispatched.DISPATCHED, Dispatched.GONE]
    assert [len(yard.lane(one)), len(yard.lane(two))] == [1, 0]


@pytest.mark.parametrize("state", ["waiting", "assigned", "completed"])
def test_second_entry_of_a_known_id_is_dropped(yard: PlayedYard, worker: str, state: str) -> None:
    first = yard.submit()
    if state != "waiting":
        assignment = yard.place(first, worker)
    if state == "completed":
        yard.finish(worker, assignment)
    before, load = yard.ledger(first.request), len(yard.lane(worker))
    second = yard.push(request_fields(first.request), first.request)

    assert yard.scripts.dispatch(yard.token, [second.to(worker)]) == [Dispatched.DUPLICATE]

    assert yard.ledger(first.request) == before
    assert len(yard.lane(worker)) == load
    assert second.entry not in [entry for entry, _ in yard.intake()]


def test_plain_entry_before_and_after_a_submission_runs_once(yard: PlayedYard, worker: str) -> None:
    request = make_request()
    early = yard.push(request_fields(request), request)
    submitted = yard.submit(request)
    late = yard.push(request_fields(request), request, intake="high")

    codes = yard.scripts.dispatch(yard.token, [e.to(worker) for e in (early, late, submitted)])

    assert codes == [Dispatched.DUPLICATE, Dispatched.DUPLICATE, Dispatched.DISPATCHED]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("how", ["unknown", "left", "lost"])
def test_worker_without_a_lease_gets_nothing(
    yard: PlayedYard, worker: str, how: str, alone: bool
) -> None:
    yard.assign(worker)
    worker, waiting = yard.fence(worker, how), yard.submit()

    codes = yard.scripts.dispatch(yard.token, [waiting.to(worker, alone=alone)])

    assert (codes, yard.alone(worker)) == ([Dispatched.CLOSED], None)
    assert [entry for entry, _ in yard.intake()] == [waiting.entry]
    assert yard.ledger(waiting.request)["state"] == "waiting"


def test_full_lane_takes_no_more_even_within_one_round(yard: PlayedYard, worker: str) -> None:
    waiting = [yard.submit() for _ in range(3)]

    codes = yard.scripts.dispatch(yard.token, [item.to(worker, 2) for item in waiting])

    assert codes == [Dispatched.DISPATCHED, Dispatched.DISPATCHED, Dispatched.FULL]
    assert [entry for entry, _ in yard.intake()] == [waiting[2].entry]


def test_entries_with_others_in_between_are_found(yard: PlayedYard) -> None:
    """Given other entries in between, and some in another intake, I expect each on its lane."""
    one, two = yard.worker("one"), yard.worker("two")
    normal = [yard.submit() for _ in range(9)]
    high = [yard.submit(priority_class="high") for _ in range(3)]
    chosen = [high[2], normal[0], normal[8], high[0], normal[4]]
    lanes = [one, two, one, two, two]

    moves = [item.to(worker) for item, worker in zip(chosen, lanes, strict=True)]
    assert yard.scripts.dispatch(yard.token, moves) == [Dispatched.DISPATCHED] * 5

    for worker in (one, two):
        meant = [item.request for item, lane in zip(chosen, lanes, strict=True) if lane == worker]
        assert [item.request for item in yard.lane(worker)] == meant
    assert len(yard.intake()) + len(yard.intake("high")) == 7


def test_large_entries_with_gaps_are_moved(yard: PlayedYard, worker: str) -> None:
    """Given deleted and unwanted entries in between, I expect the others to be moved."""
    text = "x" * 300_000  # so large that one page does not hold all
    waiting = [yard.submit(make_request(prompt=f"{at}{text}")) for at in range(50)]
    gone, left = waiting[3:40:6], waiting[5:50:7]
    yard.connection.xdel(yard.keys.intake("normal"), *(item.entry for item in gone))
    chosen = [item for item in waiting if item not in left]

    codes = yard.scripts.dispatch(yard.token, [item.to(worker) for item in chosen])

    moved = [item for item in chosen if item not in gone]
    assert [code is Dispatched.DISPATCHED for code in codes] == [item in moved for item in chosen]
    assert set(codes) == {Dispatched.DISPATCHED, Dispatched.GONE}
    assert [item.request for item in yard.lane(worker)] == [item.request for item in moved]
    rest = [item.entry for item in left if item not in gone]
    assert [entry for entry, _ in yard.intake()] == rest


def test_spoofed_system_fields_are_dropped(yard: PlayedYard, worker: str) -> None:
    names = ("attempt", "crashes", "suspected", "crashed_alone", "lost_alone", "faults", "epoch")
    spoofed = dict.fromkeys((*names, "not_before", "trial", "reason"), "9")
    spoofed |= {"sid": "high/9-9", "published": b"\1\0\0\0", "choices": b"\1"}
    request = Request(id="q1", prompt="x")
    pushed = yard.push({**spoofed, "id": "q1", "prompt": "x"}, request)

    assignment = yard.place(pushed, worker)

    assert assignment == make_assignment(
        request, entry=assignment.entry, sid=f"normal/{pushed.entry}"
    )
    yard.lose(worker)
    ((_, retry),) = yard.intake("retry")
    assert (retry[b"crashes"], retry[b"reason"]) == (b"1", b"its lease ran out")
    carried = {"sid", "attempt", "crashes", "reason", "published"}
    assert not {name.encode() for name in spoofed.keys() - carried} & retry.keys()
    assert not retry.get(b"published")


def test_spoofed_retry_starts_without_published_tokens(yard: PlayedYard, worker: str) -> None:
    request = Request(id="q1", prompt="x", stream=True)
    fields = {"id": "q1", "prompt": "x", "stream": "1", "published": b"\1\0\0\0"}
    fields["epoch"] = "5"
    pushed = yard.push(fields, request, intake="retry")

    assignment = yard.place(pushed, worker)

    assert (assignment.published, assignment.first_epoch) == (b"", None)
    assert yard.emit(worker, assignment, [5]) is Published.PUBLISHED


def test_field_named_thousands_of_times_counts_once_and_the_last_wins(
    yard: PlayedYard, worker: str
) -> None:
    """Given more fields than Lua can unpack, I expect the lane to have the validated values."""
    stream = yard.keys.intake("normal")
    pairs = ["id", "wrong", "prompt", "wrong", *["prompt", "x"] * 10_000, "id", "q1"]
    entry = yard.connection.execute_command("XADD", stream, "*", *pairs)
    ((_, fields),) = yard.intake()
    request = parse_request(fields)
    assert request == Request(id="q1", prompt="x")
    neighbour = yard.submit()

    pushed = QueuedRequest(request, "normal", entry.decode())
    codes = yard.scripts.dispatch(yard.token, [pushed.to(worker), neighbour.to(worker)])

    assert codes == [Dispatched.DISPATCHED] * 2
    assert yard.lane(worker)[0].request == request


def test_most_fields_that_are_allowed_survive_a_rescue(yard: PlayedYard, worker: str) -> None:
    extra = {f"unknown-{i}": "x" for i in range(MAX_FIELDS - 3)}
    request = Request(id="q1", prompt="x", stream=True)
    pushed = yard.push({"id": "q1", "prompt": "x", "stream": "1", **extra}, request)
    yard.emit(worker, yard.place(pushed, worker), [5])
    yard.lose(worker)

    again = yard.place(yard.waiting(request), yard.worker())

    assert (again.request, again.published) == (request, b"\5\0\0\0")
    ((_, fields),) = yard.connection.xrange(yard.keys.lane("w.2"))
    assert all(name.encode() in fields for name in extra)


def test_entry_of_thousands_of_fields_fails_no_round(yard: PlayedYard, worker: str) -> None:
    """The coordinator refuses such an entry, but the script must not fail on it."""
    request = Request(id="q1", prompt="x")
    extra = {f"unknown-{i}": "x" for i in range(10_000)}
    pushed = yard.push({"id": "q1", "prompt": "x", **extra}, request)
    neighbour = yard.submit()

    codes = yard.scripts.dispatch(yard.token, [pushed.to(worker), neighbour.to(worker)])

    assert codes == [Dispatched.DISPATCHED] * 2
    assert [item.request.id for item in yard.lane(worker)] == ["q1", neighbour.request.id]


def test_binary_and_odd_ids_keep_their_ledgers_apart(yard: PlayedYard, worker: str) -> None:
    ids = ["a/b", "a{b}", "a b\n\0", "é" * 100, "*", "%s", "'\"\\"]
    waiting = [yard.submit(make_request(request_id)) for request_id in ids]

    codes = yard.scripts.dispatch(yard.token, [item.to(worker) for item in waiting])

    assert codes == [Dispatched.DISPATCHED] * len(ids)
    assert [item.request.id for item in yard.lane(worker)] == ids


@pytest.mark.parametrize("how", ["dispatch", "duplicate", "answer", "bury"])
@pytest.mark.parametrize("entry_id", [HIGHEST, "18446744073709551615-1"])
def test_highest_entry_id_does_not_close_the_intake(
    yard: PlayedYard, worker: str, how: str, entry_id: str
) -> None:
    """Given the highest id, after which a stream takes no other, I expect the next to get in."""
    request = Request(id="q1", prompt="x")
    if how == "duplicate":
        yard.submit(request, "high")
    pushed = yard.push({"id": "q1", "prompt": "x"}, request, entry=entry_id)
    match how:
        case "dispatch" | "duplicate":
            yard.scripts.dispatch(yard.token, [pushed.to(worker)])
        case "answer":
            yard.answer(pushed)
        case _:
            yard.scripts.bury(yard.token, "normal", pushed.entry, "x")

    accepted = yard.submit()

    assert [entry for entry, _ in yard.intake()] == [accepted.entry]
    assert len(accepted.entry.partition("-")[0]) == 13


def test_intake_after_the_highest_id_recovers_once_it_is_empty(
    yard: PlayedYard, worker: str
) -> None:
    before = yard.submit()
    highest = yard.push({"id": "q1", "prompt": "x"}, Request(id="q1", prompt="x"), entry=HIGHEST)

    yard.scripts.dispatch(yard.token, [highest.to(worker)])
    assert [entry for entry, _ in yard.intake()] == [before.entry]
    yard.place(before, worker)

    assert len(yard.submit().entry.partition("-")[0]) == 13


def test_round_of_a_thousand_moves_is_dispatched(yard: PlayedYard, worker: str) -> None:
    answers = yard.scripts.submit("normal", batch := requests(1000))
    moves = [
        QueuedRequest(request, "normal", answer.sid.partition("/")[2]).to(worker)
        for request, answer in zip(batch, answers, strict=True)
    ]

    assert set(yard.scripts.dispatch(yard.token, moves)) == {Dispatched.DISPATCHED}
    assert [item.request for item in yard.lane(worker)] == batch


def reusing(yard: PlayedYard, request: Request) -> QueuedRequest:
    """Push a plain entry under a known id with another prompt."""
    other = make_request(request.id, prompt="something else")
    return yard.push(request_fields(other), other)


def test_plain_entry_moves_like_a_submitted_one_and_leaves_its_digest(
    yard: PlayedYard, worker: str
) -> None:
    request = make_request(prompt="Hello")
    pushed = yard.push(request_fields(request), request)

    assignment = yard.place(pushed, worker)

    assert (assignment.request, assignment.sid) == (request, f"normal/{pushed.entry}")
    ledger = yard.ledger(request)
    assert (ledger["state"], ledger["digest"]) == ("assigned", request_digest(request))


@pytest.mark.parametrize("is_first_plain", [True, False])
def test_another_request_under_a_known_id_stays_to_be_buried(
    yard: PlayedYard, worker: str, is_first_plain: bool
) -> None:
    request = make_request()
    first = yard.push(request_fields(request), request) if is_first_plain else yard.submit(request)
    assignment = yard.place(first, worker)
    second = reusing(yard, request)
    before = yard.ledger(request)

    codes = yard.scripts.dispatch(yard.token, [second.to(worker)])

    assert codes == [Dispatched.REUSED]
    assert [entry for entry, _ in yard.intake()] == [second.entry]
    assert (yard.lane(worker), yard.ledger(request)) == ([assignment], before)


@pytest.mark.parametrize("known", ["", None])
def test_a_first_request_without_a_digest_makes_any_other_a_duplicate(
    yard: PlayedYard, worker: str, known: str | None
) -> None:
    request = make_request()
    yard.assign(worker, request)
    ledger = yard.keys.ledger(request.client, request.id)
    yard.connection.hdel(ledger, "digest")
    if known is not None:
        yard.connection.hset(ledger, "digest", known)

    codes = yard.scripts.dispatch(yard.token, [reusing(yard, request).to(worker)])

    assert codes == [Dispatched.DUPLICATE]
