"""The history of a retry, and when it is given up."""

from __future__ import annotations

import pytest

from coordinator.dispatch.admission import History, read_history
from tokenyard.protocol.errors import Code
from tokenyard.protocol.settings import CoordinatorSettings

LIMITS = CoordinatorSettings(redis_url="redis://x", max_lost_alone=2)


@pytest.mark.parametrize(
    ("history", "trial"),
    [
        (History(), None),
        (History(crashes=2), None),
        (History(crashes=3), 0),
        (History(crashes=1, suspected=1, trial=16), 16),
        (History(crashes=1, suspected=1, trial=0), 0),
        (History(crashes=4, suspected=2, trial=4), 4),
        (History(crashes=5, suspected=2, trial=4), 0),
        (History(crashes=9, suspected=9), None),
        (History(faults=9), None),
    ],
)
def test_the_size_of_a_suspects_next_trial(history: History, trial: int | None) -> None:
    assert history.trial_size(LIMITS) == trial


@pytest.mark.parametrize(
    ("history", "choices", "code"),
    [
        (History(), 1, None),
        (History(crashes=99, suspected=99), 1, None),
        (History(lost_alone=1), 1, None),
        (History(lost_alone=2), 1, Code.POISONED),
        (History(crashed_alone=1), 1, None),
        (History(crashed_alone=2), 1, Code.POISONED),
        (History(faults=2), 1, None),
        (History(faults=3), 1, Code.INFERENCE_ERROR),
        (History(faults=3, crashed_alone=2), 1, Code.POISONED),
        (History(published=9), 1, None),
        (History(published=9, choices=9), 2, None),
        (History(published=9, choices=8), 2, Code.WORKER_LOST),
        (History(published=9), 2, Code.WORKER_LOST),
        (History(crashes=1), 2, None),
    ],
)
def test_when_a_request_is_given_up(history: History, choices: int, code: Code | None) -> None:
    failure = history.failure(LIMITS, choices)

    assert (failure and failure[0]) == code


def test_the_history_is_read_from_the_fields_of_a_retry() -> None:
    fields = {
        b"crashes": b"1",
        b"suspected": b"2",
        b"crashed_alone": b"3",
        b"lost_alone": b"4",
        b"faults": b"5",
        b"not_before": b"1700000000000",
        b"reason": b"\xffwhy",
        b"published": b"\0\0\0\0",
        b"trial": b"16",
        b"choices": b"\0\1",
    }

    known = History(1, 2, 3, 4, 5, 1_700_000_000_000, "\ufffdwhy", published=1, choices=2, trial=16)
    assert read_history(fields) == known


@pytest.mark.parametrize("forged", [b"", b"-1", b"1.5", b"9" * 16, b"\xff", b"one"])
def test_values_that_are_not_numbers_count_as_0(forged: bytes) -> None:
    names = (b"crashes", b"suspected", b"crashed_alone", b"lost_alone", b"faults", b"not_before")

    assert read_history(dict.fromkeys(names, forged)) == History()
