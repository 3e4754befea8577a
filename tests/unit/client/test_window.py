"""The window of `map`, turn by turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.builders import make_request, make_result
from tests.support.fake_clock import FakeClock
from tokenyard.client.build import PreparedRequest, SubmissionTerms
from tokenyard.client.pending import PendingRequest
from tokenyard.client.window import MapWindow, Numbered
from tokenyard.protocol.errors import UnknownRequest
from tokenyard.protocol.wire import template_of


def prepared(request_id: str) -> PreparedRequest:
    request = make_request(request_id)
    return PreparedRequest(request, SubmissionTerms(), None, 100, template_of(request))


def make_window(items: Iterable[Any], size: int = 8, **options: Any) -> MapWindow:
    usual = {"ordered": False, "wake": lambda: None, "timeout_s": 5.0}
    return MapWindow(items, size, **(usual | options))


def submit_all(window: MapWindow, now: float = 0.0) -> dict[int, PendingRequest]:
    requests = {}
    for index, ready in window.take_unsubmitted(now):
        requests[index] = PendingRequest(ready.request.id, None, now)
        window.submitted(index, requests[index])
    return requests


def pull(window: MapWindow) -> int:
    items = window.pull()
    window.add([prepared(str(item)) for item in items])
    return len(items)


def answer(pending: PendingRequest) -> None:
    pending.take(make_result(pending.id, [1]), 0.0)


def test_an_endless_source_is_pulled_as_there_is_room() -> None:
    window = make_window(itertools.count(), size=8)
    assert pull(window) == 8
    requests = submit_all(window)
    assert pull(window) == 0
    answer(requests[3])
    assert [index for index, _ in window.ready()] == [3]
    assert pull(window) == 0, "one place is no burst"
    answer(requests[4])
    assert list(window.ready())
    assert pull(window) == 2


def test_a_window_of_one() -> None:
    window = make_window(["a", "b"], size=1)
    for number in range(2):
        assert pull(window) == 1
        answer(submit_all(window)[number])
        assert [index for index, _ in window.ready()] == [number]
    assert pull(window) == 0
    assert window.is_over


def test_results_in_order_wait_for_the_first(fake_clock: FakeClock) -> None:
    window = make_window(range(4), ordered=True)
    pull(window)
    requests = submit_all(window)
    answer(requests[1])
    answer(requests[2])
    assert list(window.ready()) == []
    assert window.wait_s() == 5.0
    answer(requests[0])
    assert [index for index, _ in window.ready()] == [0, 1, 2]
    assert not window.is_over


def test_a_window_is_stuck_where_nothing_moves(fake_clock: FakeClock) -> None:
    window = make_window(range(2))
    pull(window)
    requests = submit_all(window)
    fake_clock.advance(4.0)
    answer(requests[0])
    for _ in window.ready():
        fake_clock.advance(9.0)  # the caller may take its time
    assert not window.is_stuck
    assert window.wait_s() == 5.0
    fake_clock.advance(5.0)
    assert window.is_stuck


def test_a_window_may_wait_forever() -> None:
    window = make_window(["x"], timeout_s=math.inf)
    pull(window)
    submit_all(window)
    assert 0 < window.wait_s() < math.inf


def test_postponed_requests_come_first_and_not_before_their_time(fake_clock: FakeClock) -> None:
    window = make_window(range(3))
    pull(window)
    prepared: list[Numbered] = window.take_unsubmitted(0.0)
    window.postpone(prepared[1:], retry_at=fake_clock.now + 2.0)
    window.submitted(0, PendingRequest("0", None, 0.0))
    fake_clock.advance(1.5)
    assert window.take_unsubmitted(fake_clock.now) == []
    assert window.wait_s() == 0.5
    assert window.take_unsubmitted(fake_clock.now + 0.5) == prepared[1:]


def test_a_result_that_was_there_before_we_listened_is_not_lost() -> None:
    woken: list[bool] = []
    window = make_window(["x"], wake=lambda: woken.append(True))
    pull(window)
    [(index, _)] = window.take_unsubmitted(0.0)
    pending = PendingRequest("x", None, 0.0)
    answer(pending)
    window.submitted(index, pending)
    assert woken
    assert window.wait_s() == 0.0
    assert len(list(window.ready())) == 1


@pytest.mark.parametrize("ordered", [False, True])
def test_a_request_that_comes_twice_has_its_result_twice(ordered: bool) -> None:
    window = make_window(["x", "y", "x", "x"], ordered=ordered)
    pull(window)
    x, y = PendingRequest("x", None, 0.0), PendingRequest("y", None, 0.0)
    for index, pending in enumerate((x, y, x)):
        window.submitted(index, pending)
    answer(x)
    answer(y)
    # It may be over before it comes again.
    window.submitted(3, x)
    found = [(index, result.id) for index, result in window.ready()]
    assert sorted(found) == [(0, "x"), (1, "y"), (2, "x"), (3, "x")]
    assert list(window.ready()) == []


def test_an_end_without_a_result_is_raised() -> None:
    window = make_window(["x"])
    pull(window)
    submit_all(window)[0].fail(UnknownRequest("gone"))
    with pytest.raises(UnknownRequest):
        list(window.ready())


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        make_window([], size=0)


def test_a_slow_source_does_not_hold_back_what_it_gave(fake_clock: FakeClock) -> None:
    fake_clock.ticks_s = 1.0
    window = make_window(range(8))
    assert pull(window) == 1
    assert window.has_room
