"""What was reserved of a limit is given back when the request is over."""

from __future__ import annotations

import pytest

from tests.scripts.quota_rig import (
    ACCEPTED,
    EACH,
    MOST,
    QUOTA,
    WIDTH,
    WINDOWS,
    accept,
    codes,
    counted,
    limit,
    submit,
)
from tests.scripts.tenant_rig import TOKENS, dispatch, generated, result
from tests.support.yard import PlayedYard
from tokenyard.protocol.errors import Code


def end_running(yard: PlayedYard, worker: str, status: str, output: int) -> None:
    yard.scripts.finish(worker, [result(dispatch(yard, worker, accept(yard)), output, status)])


def used(yard: PlayedYard, worker: str, how: str) -> int:
    """Let a request end in some way; the tokens that it has used."""
    match how:
        case "completed" | "failed" | "expired":
            end_running(yard, worker, how, 3)
            return TOKENS + 3
        case "more than reserved":  # its model has a default of its own
            end_running(yard, worker, "completed", 50)
            return TOKENS + 50
        case "cancelled while waiting":
            request = accept(yard).request
            yard.scripts.cancel(request.client, request.id, "enough")
            return 0
        case "cancelled while running":
            running = dispatch(yard, worker, accept(yard))
            yard.scripts.cancel(running.request.client, running.request.id, "enough")
            assert counted(yard, WINDOWS[0]) == EACH, "it is still reserved: it may have run"
            yard.scripts.settle_cancelled(worker, [generated(running, 7)])
            return TOKENS + 7
        case "expired while waiting":
            yard.answer(accept(yard), Code.DEADLINE_EXCEEDED)
            return 0
        case "crashed and completed" | "crashed and cancelled":
            request = dispatch(yard, worker, accept(yard)).request
            yard.lose(worker)
            assert counted(yard, WINDOWS[0]) == EACH, "it is still reserved: it runs again"
            if how.endswith("cancelled"):
                yard.scripts.cancel(request.client, request.id, "enough")
                return 0
            again = yard.worker("again")
            placed = dispatch(yard, again, yard.waiting(request))
            yard.scripts.finish(again, [result(placed, 3)])
            return TOKENS + 3
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    [
        "completed",
        "failed",
        "expired",
        "more than reserved",
        "cancelled while waiting",
        "cancelled while running",
        "expired while waiting",
        "crashed and completed",
        "crashed and cancelled",
    ],
)
def test_what_was_reserved_is_given_back_at_the_end(
    yard: PlayedYard, worker: str, how: str
) -> None:
    limit(yard, tokens_per_minute=1000, tokens_per_day=5000, max_waiting_requests=2)
    tokens = used(yard, worker, how)
    assert [counted(yard, window) for window in WINDOWS] == [tokens, tokens]
    # Nothing waits any more, so two may.
    assert codes(submit(yard, 3)) == [ACCEPTED, ACCEPTED, QUOTA]


def test_a_repeated_result_gives_back_once(yard: PlayedYard, worker: str) -> None:
    limit(yard, tokens_per_minute=1000)
    assignment = dispatch(yard, worker, accept(yard))
    for _ in range(2):
        yard.scripts.finish(worker, [result(assignment, 3)])
    assert counted(yard, "tokens_per_minute") == TOKENS + 3


@pytest.mark.parametrize("window", WINDOWS)
def test_what_was_reserved_before_the_window_is_not_given_back(
    yard: PlayedYard, worker: str, window: str
) -> None:
    limit(yard, **{window: 1000})
    assignment = dispatch(yard, worker, accept(yard))
    # Once a later bucket has the place of that in which it was reserved,
    mark, _, size = WIDTH[window]
    counts = yard.keys.tenant("acme")
    for name, text in yard.connection.hgetall(counts).items():
        if name[:1] == mark.encode() and name[1:].isdigit():
            yard.connection.hset(counts, name, f"{int(text.split()[0]) + size} 500")
    # I expect what that counts to stay as it is.
    yard.scripts.finish(worker, [result(assignment, 3)])
    assert counted(yard, window) == 500


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("output", "more"), [(MOST + 50, 50), (3, 0)])
def test_what_was_used_beyond_what_has_left_the_window_counts_now(
    yard: PlayedYard, worker: str, window: str, output: int, more: int
) -> None:
    limit(yard, **{window: 1000})
    assignment = dispatch(yard, worker, accept(yard))
    # Given a request from before the window, as its tokens say in an hour, or in days,
    mark, width, size = WIDTH[window]
    counts, request = yard.keys.tenant("acme"), assignment.request
    ledger = yard.keys.ledger(request.client, request.id)
    reserved, ms, tenant = (yard.connection.hget(ledger, "reserved") or b"").decode().split()
    earlier_ms = int(ms) - 2 * size * width
    number = earlier_ms // width
    yard.connection.delete(counts)
    yard.connection.hset(counts, f"{mark}{number % size}", f"{number} {reserved}")
    yard.connection.hset(ledger, "reserved", f"{reserved} {earlier_ms} {tenant}")
    # I expect that its end counts now what it has used beyond its reservation.
    yard.scripts.finish(worker, [result(assignment, output)])
    assert codes(submit(yard)) == [ACCEPTED]
    rings = yard.connection.hgetall(counts)
    newest = max(text for name, text in rings.items() if name[:1] == mark.encode())
    assert int(newest.split()[1]) == EACH + more


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 1",
        "1e99 1 acme",
        "-5 1 acme",
        "1 1 ../x",
        "9" * 300 + " 1 acme",
        "1 " + "9" * 90 + " acme",
        "999999999999999999 {now} acme",
        "5 {now} ",
    ],
)
def test_a_forged_reservation_breaks_nothing(yard: PlayedYard, worker: str, text: str) -> None:
    limit(yard, tokens_per_minute=1000)
    assignment = dispatch(yard, worker, accept(yard))
    ledger = yard.keys.ledger(assignment.request.client, assignment.request.id)
    yard.connection.hset(ledger, "reserved", text.format(now=yard.now_ms))
    yard.scripts.finish(worker, [result(assignment, 3)])
    assert 0 <= counted(yard, "tokens_per_minute") <= EACH
    assert codes(submit(yard)) == [ACCEPTED]
