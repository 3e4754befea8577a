"""A worker's entry in the roster tells what it makes of answers that nobody has seen yet."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.waiting import eventually
from tokenyard.protocol.wire import SamplingParams


@pytest.mark.long
def test_tokens_of_whole_answers_are_told_before_their_end(plant: Plant) -> None:
    plant.up(simulated_step_s=0.05)
    params = SamplingParams(max_tokens=8000, ignore_eos=True)
    plant.scripts.submit("normal", [make_request(params=params) for _ in range(4)])

    def tokens() -> int:
        [info] = plant.roster().values()
        assert not info.tally.finished
        return info.tally.tokens

    first = eventually(tokens)
    assert eventually(lambda: tokens() > first)
