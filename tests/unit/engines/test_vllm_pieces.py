"""How many tokens of a stream are sent together: by the engine's speed and number of streams."""

from __future__ import annotations

import pytest

from worker.engines.vllm.branches import FEW, MOST, PIECE_S, PieceSize

MANY = 8 * FEW


def stepping(step_s: float, running: int = MANY, least: int = 1) -> PieceSize:
    """A piece size after a dozen steps with this many requests."""
    size = PieceSize(least)
    for number in range(12):
        size.note(running, number * step_s)
    return size


@pytest.mark.parametrize(
    ("step_s", "tokens"), [(0.001, MOST), (0.008, 3), (0.012, 2), (0.02, 1), (1.0, 1)]
)
def test_pieces_of_many_streams_come_at_about_the_same_rate(step_s: float, tokens: int) -> None:
    assert stepping(step_s).choose(MANY) == tokens
    assert tokens == 1 or tokens * step_s <= PIECE_S


def test_each_token_is_sent_immediately_when_few_run() -> None:
    assert stepping(0.001).choose(FEW - 1) == 1


def test_nothing_is_held_back_before_the_speed_is_known() -> None:
    assert PieceSize(1).choose(MANY) == 1
    assert stepping(0.001, running=FEW - 1).choose(MANY) == 1


def test_the_operators_setting_is_the_minimum() -> None:
    assert stepping(0.001, least=10).choose(MANY) == 10
    assert stepping(1.0, least=10).choose(1) == 10


def test_a_long_prompt_among_short_steps_changes_little() -> None:
    size = stepping(0.008)

    size.note(MANY, 11 * 0.008 + 0.5)

    assert size.choose(MANY) == 3


def test_a_slower_engine_is_recognized_in_the_end() -> None:
    size, now = stepping(0.001), 1.0

    for _ in range(60):
        size.note(MANY, now := now + 0.1)

    assert size.choose(MANY) == 1


def test_the_time_with_few_requests_is_no_step() -> None:
    size = stepping(0.1)

    size.note(1, 1.2)
    size.note(MANY, 1.2001)

    assert size.choose(MANY) == 1
