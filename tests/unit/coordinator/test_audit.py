"""The backlog is compared with what waits, page by page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coordinator.dispatch.intake
from coordinator.dispatch.intake import BacklogReconciler
from tokenyard.protocol.streams import position

PAGE = 3


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.dispatch.intake, "PAGE", PAGE)


def entry(at: int) -> str:
    return f"{at // 3 + 8}-{at % 3}"  # orders otherwise as text than as a place


def audit(held: list[int], waiting: set[int]) -> list[str]:
    """The entries found gone, page by page as the intake does it."""
    auditing = BacklogReconciler([entry(at) for at in held])
    gone: list[str] = []
    ids = [entry(at) for at in sorted(waiting)]
    for _ in range(len(held) + len(waiting) + 1):
        if auditing.is_over:
            return gone
        after = auditing.after
        first = 0 if after == "-" else ids.index(after.removeprefix("(")) + 1
        until = [one for one in ids if position(one) <= position(auditing.last)]
        gone += auditing.compare(until[first : first + PAGE])
    pytest.fail("it does not end")


@given(st.lists(st.integers(0, 30), unique=True), st.sets(st.integers(0, 30)))
def test_an_audit_finds_entries_that_do_not_wait(held: list[int], waiting: set[int]) -> None:
    """In whatever order they are held, since some may have been read again."""
    assert audit(held, waiting) == [entry(at) for at in sorted(set(held) - waiting)]
