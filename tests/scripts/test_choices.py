"""emit.lua, rescue.lua, hand_back.lua, finish.lua: the choice of each published token."""

from __future__ import annotations

import pytest

from coordinator.dispatch.admission import read_history
from tests.support.builders import make_delta, make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.wire import Assignment, Request, SamplingParams
from tokenyard.scripts.answers import Publication, Published

LIMITS = CoordinatorSettings(redis_url="redis://x")


def several(count: int = 2) -> Request:
    return make_request(stream=True, params=SamplingParams(n=count))


def emit(
    yard: PlayedYard, assignment: Assignment, *deltas: tuple[int, int, list[int]]
) -> list[int]:
    """Emit deltas, given as (seq, index, tokens), in one call."""
    request = assignment.request
    made = [
        Publication(assignment, make_delta(request.id, seq, tokens, index=index))
        for seq, index, tokens in deltas
    ]
    return [int(code) for code in yard.scripts.emit("w.1", made)]


def noted(yard: PlayedYard, request: Request) -> bytes | None:
    return yard.connection.get(yard.keys.choices(request.client, request.id))


def test_each_token_is_noted_with_its_choice(yard: PlayedYard) -> None:
    assignment = yard.assign(yard.worker(), several())

    emit(yard, assignment, (0, 0, [1, 2]), (2, 1, [3]))
    emit(yard, assignment, (3, 1, [4]), (4, 0, [5]))

    assert noted(yard, assignment.request) == b"\0\0\1\1\0"
    assert yard.ttl_s(yard.keys.choices("anon", assignment.request.id)) > 23 * 3600


def test_repeated_or_stale_deltas_are_not_noted_again(yard: PlayedYard) -> None:
    assignment = yard.assign(yard.worker(), several())
    emit(yard, assignment, (0, 1, [1]))

    assert emit(yard, assignment, (0, 1, [1]), (5, 0, [9])) == [Published.REPEATED, 0]

    assert noted(yard, assignment.request) == b"\1"


def test_retry_carries_no_choices_of_an_earlier_request_of_its_id(yard: PlayedYard) -> None:
    # Given a cancelled stream whose ledger expires before its noted choices
    request = several()
    emit(yard, yard.assign(yard.worker(), request), (0, 1, [1]))
    yard.scripts.cancel(request.client, request.id, "by a test")
    yard.connection.delete(yard.keys.ledger(request.client, request.id))
    assert noted(yard, request)

    # If its id is used again, and the worker dies before the first token,
    worker = yard.worker()
    yard.assign(worker, request)
    yard.lose(worker)

    # I expect that it can run again.
    [(_, fields)] = yard.intake("retry")
    assert b"choices" not in fields
    assert read_history(fields).failure(LIMITS, 2) is None


def test_a_stream_of_one_choice_notes_no_choices(yard: PlayedYard, worker: str) -> None:
    one, two = yard.assign(worker, several(1)), yard.assign(worker, several(2))
    made = [
        Publication(one, make_delta(one.request.id, 0, [1]), 7),
        Publication(two, make_delta(two.request.id, 0, [2], index=1), 8),
    ]

    yard.scripts.emit(worker, made)

    assert (noted(yard, one.request), noted(yard, two.request)) == (None, b"\1")
    epochs = [yard.ledger(each.request)["epoch"] for each in (one, two)]
    assert epochs == ["7", "8"]


@pytest.mark.parametrize("how", ["rescue", "hand_back"])
def test_the_next_attempt_gets_the_noted_choices(yard: PlayedYard, worker: str, how: str) -> None:
    assignment = yard.assign(worker, several())
    emit(yard, assignment, (0, 1, [1, 2]), (2, 0, [3]))

    if how == "rescue":
        yard.scripts.retire(worker, "lost")
        yard.rescue(worker)
    else:
        yard.scripts.hand_back(worker, assignment, 0, "x")

    again = yard.place(yard.waiting(assignment.request), yard.worker("v"))
    assert again.choices == b"\1\1\0"
    assert [again.published_of(index) for index in (0, 1)] == [[3], [1, 2]]


def test_result_deletes_the_noted_choices(yard: PlayedYard, worker: str) -> None:
    assignment = yard.assign(worker, several())
    emit(yard, assignment, (0, 1, [1]))

    assert yard.finish(worker, assignment) is Published.PUBLISHED

    assert noted(yard, assignment.request) is None


def test_choices_of_an_earlier_life_are_overwritten(yard: PlayedYard) -> None:
    request = several()
    yard.connection.set(yard.keys.choices("anon", request.id), b"\1\1\1")
    assignment = yard.assign(yard.worker(), request)

    emit(yard, assignment, (0, 0, [1]))

    assert noted(yard, request) == b"\0"
