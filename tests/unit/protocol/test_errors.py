"""What errors tell a client to do."""

from __future__ import annotations

import pytest

from tokenyard.protocol.errors import quota_exceeded


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        ("models", "name a model that the tenant may use"),
        ("classes", "use a priority class that the tenant may use"),
        ("tokens_per_minute", "ask for fewer tokens"),
        ("max_tokens", "ask for fewer tokens"),
    ],
)
def test_a_limit_that_never_admits_says_what_would_be_admitted(limit: str, advice: str) -> None:
    message = quota_exceeded(limit, None)
    assert message.startswith(f"{limit}: ")
    assert message.endswith(advice)
