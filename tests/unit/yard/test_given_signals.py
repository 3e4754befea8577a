"""Workers that were told to end and have not."""

from __future__ import annotations

import pytest

from tests.support.builders import make_worker_info
from tokenyard.yard.changes import GivenSignal, still_there


@pytest.mark.parametrize(("started_ms", "is_there"), [(900, True), (1_000, True), (1_001, False)])
def test_a_process_that_began_later_was_not_told(started_ms: int, is_there: bool) -> None:
    given = GivenSignal(1_000, "DRAIN", "worker w", "olga", "", ("w.1",))
    live = {"w.2": make_worker_info("w", started_ms=started_ms)}  # another incarnation
    assert still_there(given, live) == (["w.2"] if is_there else [])


def test_another_worker_was_not_told() -> None:
    given = GivenSignal(1_000, "STOP", "worker w", "olga", "", ("w.1",))
    assert still_there(given, {"v.1": make_worker_info("v", started_ms=1)}) == []
