"""submit.lua: bounds of the queue, answers to refused requests, and the count of queued tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest, requests
from tokenyard.protocol.keys import PRIORITY_CLASSES, TENANTS_QUEUED_TOKENS
from tokenyard.protocol.wire import Request
from tokenyard.scripts.answers import Acceptance, Submitted

FAR_MS = 9_999_999_999_999


def tell(yard: PlayedYard, **limits: float) -> None:
    """Write limits and rate as the leader does."""
    yard.connection.hset(yard.keys.info, mapping=limits)


def submit(
    yard: PlayedYard, *wanted: Request, priority_class="normal", **how
) -> Sequence[Acceptance]:
    return yard.scripts.submit(priority_class, wanted, **how)


def sized(tokens: int) -> Request:
    return make_request(tokens=range(tokens))


def test_position_counts_all_requests_that_are_served_earlier(
    yard: PlayedYard, worker: str
) -> None:
    """Given retries and other classes, I expect only those that are served earlier to count."""
    yard.assign(worker)
    yard.lose(worker)
    for priority_class, count in (("high", 2), ("normal", 3), ("low", 4)):
        submit(yard, *requests(count), priority_class=priority_class)

    def position(priority_class) -> int:
        (accepted,) = submit(yard, make_request(), priority_class=priority_class)
        return accepted.position

    assert [position(name) for name in ("low", "normal", "high")] == [1 + 2 + 3 + 4, 1 + 2 + 3, 3]


def test_requests_of_a_burst_have_successive_positions(yard: PlayedYard) -> None:
    tell(yard, rate=10)

    answers = submit(yard, *requests(3))

    assert [(item.position, item.eta_ms) for item in answers] == [(0, 0), (1, 100), (2, 200)]


@pytest.mark.parametrize("rate", [None, 0])
def test_without_a_measured_rate_there_is_no_estimate(yard: PlayedYard, rate) -> None:
    if rate is not None:
        tell(yard, rate=rate)

    assert {item.eta_ms for item in submit(yard, *requests(2))} == {-1}


@pytest.mark.parametrize(
    ("told", "retry_after_ms"),
    [
        ({}, 1000),  # without a known rate
        ({"rate": 4}, 250),  # room for one
        ({"rate": 4, "waiting_clients": 8}, 2000),  # and this client's turn
        ({"rate": 1000}, 100),  # never immediately
        ({"rate": 0.001}, 30_000),  # the maximum
    ],
)
def test_full_yard_returns_the_likely_time_of_a_free_place(
    yard: PlayedYard, told: dict[str, float], retry_after_ms: int
) -> None:
    tell(yard, max_num_queued_reqs=2, **told)
    submit(yard, *requests(2))

    (full,) = submit(yard, make_request())

    assert full.code is Submitted.FULL
    assert abs(full.retry_after_ms - retry_after_ms) <= retry_after_ms / 4 + 1  # rounded down


@pytest.mark.parametrize(
    ("queued", "rate", "pause_ms"),
    [
        pytest.param(1200, 100, 3000, id="a part of 12 s of work"),
        pytest.param(500, 1, 30_000, id="the longest"),
    ],
)
def test_retry_pauses_of_a_long_queue_have_jitter(
    yard: PlayedYard, queued: int, rate: int, pause_ms: int
) -> None:
    tell(yard, max_num_queued_reqs=queued, rate=rate)
    submit(yard, *requests(queued))

    answers = submit(yard, *(make_request(f"more-{number}") for number in range(40)))

    times = {answer.retry_after_ms for answer in answers}
    assert 0.75 * pause_ms <= min(times) <= max(times) <= 1.25 * pause_ms
    assert len(times) > 20, "they do not all come back at the same moment"


def test_later_requests_of_a_refused_burst_retry_later(yard: PlayedYard) -> None:
    tell(yard, max_num_queued_reqs=1, rate=1)

    first, *_, last = submit(yard, *requests(12))[1:]

    assert last.retry_after_ms > 5 * first.retry_after_ms


def test_overfull_yard_returns_longer_retry_pauses(yard: PlayedYard) -> None:
    tell(yard, max_num_queued_reqs=2, rate=2)
    for request in requests(5):
        yard.push({"id": request.id, "prompt": "x"}, request)

    (full,) = submit(yard, make_request())

    assert full.code is Submitted.FULL
    assert 1500 <= full.retry_after_ms <= 2500


@pytest.mark.parametrize("kind", ["reqs", "tokens"])
def test_reserved_room_is_for_higher_classes_only(yard: PlayedYard, kind: str) -> None:
    """If low or normal requests flood the yard, I expect higher classes to be accepted."""
    tell(yard, **{f"max_num_queued_{kind}": 10}, max_normal_share=0.7, max_low_share=0.4)

    accepted = {
        name: sum(
            answer.code is Submitted.ACCEPTED
            for answer in yard.scripts.submit(name, [one(name, number) for number in range(20)])
        )
        for name in reversed(PRIORITY_CLASSES)
    }

    assert accepted == {"low": 4, "normal": 3, "high": 3}


def test_a_flood_of_higher_classes_leaves_room_for_low_ones(yard: PlayedYard) -> None:
    tell(yard, max_num_queued_reqs=10, max_normal_share=0.7, max_low_share=0.4)
    yard.scripts.submit("high", [one("high", number) for number in range(8)])

    codes = [yard.scripts.submit("low", [one("low", number)])[0].code for number in range(3)]

    assert codes == [Submitted.ACCEPTED] * 2 + [Submitted.FULL]


def one(name: str, number: int) -> Request:
    """A request of one queued token."""
    return make_request(f"{name}-{number}", prompt="abcd")


def test_queued_tokens_are_bounded(yard: PlayedYard) -> None:
    tell(yard, max_num_queued_tokens=100)

    answers = submit(yard, sized(60), sized(50), sized(40), sized(1))

    codes = [item.code for item in answers]
    assert codes == [Submitted.ACCEPTED, Submitted.FULL, Submitted.ACCEPTED, Submitted.FULL]
    assert answers[1].retry_after_ms > 0
    assert yard.queued_tokens() == 100


def test_request_larger_than_the_bound_is_accepted_only_by_an_empty_yard(yard: PlayedYard) -> None:
    """Given a request above the bound, I expect an idle yard to accept it."""
    tell(yard, max_num_queued_tokens=100)

    first, second = submit(yard, sized(500), sized(1))

    assert (first.code, second.code) == (Submitted.ACCEPTED, Submitted.FULL)


def test_refused_requests_add_nothing_to_the_count(yard: PlayedYard) -> None:
    tell(yard, max_num_queued_reqs=1)
    waiting = yard.submit(sized(10))

    submit(yard, sized(10), waiting.request)

    assert yard.queued_tokens() == 10


def test_an_unmeetable_deadline_is_refused_on_request(yard: PlayedYard) -> None:
    tell(yard, rate=1)
    submit(yard, *requests(5))
    soon = make_request(deadline_ms=yard.now_ms + 2000)

    (late,) = submit(yard, soon, refuse_late=True)

    assert (late.code, late.eta_ms) == (Submitted.LATE, 5000)
    assert yard.ledger(soon) == {}
    assert submit(yard, soon)[0].code is Submitted.ACCEPTED


@pytest.mark.parametrize(
    ("rate", "deadline_ms"),
    [
        pytest.param(1, None, id="no deadline"),
        pytest.param(1, FAR_MS, id="in time"),
        pytest.param(0, 1, id="no rate"),
    ],
)
def test_a_deadline_is_accepted(yard: PlayedYard, rate: int, deadline_ms: int | None) -> None:
    tell(yard, rate=rate)
    submit(yard, *requests(5))

    (accepted,) = submit(yard, make_request(deadline_ms=deadline_ms), refuse_late=True)

    assert accepted.code is Submitted.ACCEPTED


def test_intake_emptied_by_hand_resets_the_count(yard: PlayedYard) -> None:
    tell(yard, max_num_queued_tokens=100)
    yard.submit(sized(90))
    yard.connection.xtrim(yard.keys.intake("normal"), maxlen=0)

    assert submit(yard, sized(50))[0].code is Submitted.ACCEPTED
    assert yard.queued_tokens() == 50


def test_negative_count_does_not_raise_the_bound(yard: PlayedYard) -> None:
    """Given a count that an operator made invalid, I expect the bound to hold immediately."""
    tell(yard, max_num_queued_tokens=100)
    yard.connection.hset(yard.keys.tally, "queued_tokens", -1000)
    yard.push({"id": "q1", "prompt": "x"})

    codes = [item.code for item in submit(yard, sized(60), sized(60))]

    assert codes == [Submitted.ACCEPTED, Submitted.FULL]


@pytest.mark.parametrize("seed", range(3))
def test_count_equals_the_queued_tokens_after_every_change(
    yard: PlayedYard, worker: str, seed: int
) -> None:
    """If requests leave the intake in every way and return, I expect an exact count."""
    draw = random.Random(seed)
    queued: dict[str, tuple[QueuedRequest, int]] = {}
    running = []
    for _ in range(120):
        action = draw.choice(["submit", "submit", "plain", "place", "answer", "cancel", "back"])
        chosen = draw.choice(list(queued.values()))[0] if queued else None
        if action == "submit" or (chosen is None and action in ("place", "answer", "cancel")):
            tokens, tenant = range(size := draw.randint(1, 50)), draw.choice(["", "", "acme"])
            request = make_request(tokens=tokens, tenant=tenant)
            queued[request.id] = (yard.submit(request), size)
        elif action == "plain":
            pushed = yard.push({"id": (other := make_request()).id, "prompt": "x"}, other)
            running.append(yard.place(pushed, worker))
        elif action == "back" and running:
            assignment = running.pop()
            if draw.random() < 0.5:
                yard.scripts.hand_back(worker, assignment, 0, "x")
                running.append(yard.place(yard.waiting(assignment.request), worker))
            else:
                yard.finish(worker, assignment)
        elif chosen is not None:
            queued.pop(chosen.request.id)
            if action == "place":
                twice = [chosen.to(worker), chosen.to(worker)]
                yard.scripts.dispatch(yard.token, twice)
                running.append(yard.lane(worker)[-1])
            elif action == "answer":
                for _ in range(2):
                    yard.answer(chosen)
            else:
                for _ in range(2):
                    yard.scripts.cancel("anon", chosen.request.id, "x")
        assert yard.queued_tokens() == sum(size for _, size in queued.values())
        of_tenants = sum(size for one, size in queued.values() if one.request.tenant)
        counted = int(yard.connection.hget(yard.keys.tally, TENANTS_QUEUED_TOKENS) or 0)
        assert counted == of_tenants
