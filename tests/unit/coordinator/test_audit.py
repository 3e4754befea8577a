"""What is held is compared with what is pending, page by page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coordinator.dispatch.audit
from coordinator.dispatch.audit import PendingReconciler

PAGE = 3


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.dispatch.audit, "PAGE", PAGE)


def entry(at: int) -> str:
    return f"{at // 3 + 8}-{at % 3}"  # orders otherwise as text than as a place


def audit(held: set[int], pending: set[int]) -> list[str]:
    """What is found gone, asking as the intake does."""
    auditing = PendingReconciler([entry(at) for at in sorted(held)])
    gone: list[str] = []
    ids = [entry(at) for at in sorted(pending)]
    for _ in range(len(held) + len(pending) + 1):
        if auditing.is_over:
            return gone
        after = auditing.after
        first = 0 if after == "-" else ids.index(after.removeprefix("(")) + 1
        gone += auditing.compare(ids[first : first + PAGE])
    pytest.fail("it does not end")


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_an_audit_finds_entries_that_are_not_pending(held: set[int], pending: set[int]) -> None:
    assert audit(held, pending) == [entry(at) for at in sorted(held - pending)]
