"""Invalid counters restart and stop no script."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.scripts.answers import Submitted

INVALID = ["garbage", "", "1.5", "inf", "nan", "9" * 30, "9223372036854775807"]


@pytest.mark.parametrize("value", INVALID)
def test_requests_run_with_invalid_counters(yard: PlayedYard, value: str) -> None:
    # Given invalid counters
    yard.connection.hset(yard.keys.tally, "queued_tokens", value)
    for name in ("count:cancelled:normal", "count:ID_REUSED"):
        yard.connection.hset(yard.keys.tally, name, value)
    # I expect requests to be accepted, run and cancelled as usual.
    first, second = yard.submit(), yard.submit()
    yard.connection.hset(yard.keys.tally, "queued_tokens", value)
    yard.place(first, yard.worker())
    yard.scripts.cancel(second.request.client, second.request.id, "by a test")
    [answer] = yard.scripts.submit("normal", [make_request(second.request.id, tokens=[9])])
    assert answer.code is Submitted.REUSED
    assert yard.submit()


@pytest.mark.parametrize("value", INVALID)
def test_requests_are_accepted_with_invalid_limits(yard: PlayedYard, value: str) -> None:
    for name in ("rate", "max_num_queued_tokens"):
        yard.connection.hset(yard.keys.info, name, value)
    [answer] = yard.scripts.submit("normal", [make_request()])
    assert answer.code is Submitted.ACCEPTED


@pytest.mark.parametrize("value", INVALID)
def test_numbers_of_leaders_and_workers_stay_unique(yard: PlayedYard, value: str) -> None:
    names = ("epoch", "incarnation")
    yard.connection.hset(yard.keys.info, mapping=dict.fromkeys(names, value))
    yard.connection.delete(yard.keys.leader)
    tokens = []
    for _ in range(3):
        tokens.append(yard.scripts.lead("me", 5000))
        yard.connection.delete(yard.keys.leader)
    workers = [yard.worker() for _ in range(3)]
    assert len(set(tokens)) == len(set(workers)) == 3
    assert all(token.partition(":")[0].isdigit() for token in tokens)
