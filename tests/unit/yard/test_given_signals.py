"""Workers that were told to end and have not."""

from __future__ import annotations

import pytest

from tests.support.builders import make_worker_info
from tokenyard.yard.changes import GivenSignal, still_there


@pytest.mark.parametrize(
    ("worker", "started_ms", "is_there"),
    [
        ("w.2", 900, True),  # another incarnation
        ("w.2", 1_000, True),
        ("w.2", 1_001, False),  # a process that began later was not told
        ("v.1", 1, False),
    ],
)
def test_a_worker_that_was_told_to_end_is_still_there(
    worker: str, started_ms: int, is_there: bool
) -> None:
    given = GivenSignal(1_000, "DRAIN", "worker w", "olga", "", ("w.1",))
    live = {worker: make_worker_info(worker.partition(".")[0], started_ms=started_ms)}
    assert still_there(given, live) == ([worker] if is_there else [])
