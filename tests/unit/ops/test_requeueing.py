"""Why a failed request without a dead letter cannot run again."""

from __future__ import annotations

import pytest

from tokenyard.ops.requests import what_is_in_the_way


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("", "is not known here"),
        ("waiting", "waits already"),
        ("assigned", "runs already"),
        ("completed", "has completed"),
        ("cancelled", "was cancelled"),
        ("expired", "has expired"),
        ("failed", "failed without a dead letter"),
        ("dancing", "cannot be requeued now"),
    ],
)
def test_each_state_has_its_reason(state: str, reason: str) -> None:
    assert what_is_in_the_way(state).startswith(reason)
