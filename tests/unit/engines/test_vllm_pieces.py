"""How many tokens of a stream go out at a time: by how fast the engine steps, and for how many."""

from __future__ import annotations

import pytest

from worker.engines.vllm.pieces import FEW, MOST, PIECE_S, PieceSize

MANY = 8 * FEW


def stepping(step_s: float, running: int = MANY, least: int = 1) -> PieceSize:
    """One that has seen a dozen steps of so many requests."""
    size = PieceSize(least)
    for number in range(12):
        size.note(running, number * step_s)
    return size


@pytest.mark.parametrize(
    ("step_s", "tokens"), [(0.001, MOST), (0.008, 3), (0.012, 2), (0.02, 1), (1.0, 1)]
)
def test_pieces_of_many_streams_come_about_as_often(step_s: float, tokens: int) -> None:
    assert stepping(step_s).choose(MANY) == tokens
    assert tokens == 1 or tokens * step_s <= PIECE_S


def test_each_token_goes_out_at_once_where_few_run() -> None:
    assert stepping(0.001).choose(FEW - 1) == 1


def test_nothing_is_kept_back_before_it_is_known_how_fast_the_engine_is() -> None:
    assert PieceSize(1).choose(MANY) == 1
    assert stepping(0.001, running=FEW - 1).choose(MANY) == 1


def test_what_the_operator_has_set_is_the_least() -> None:
    assert stepping(0.001, least=10).choose(MANY) == 10
    assert stepping(1.0, least=10).choose(1) == 10


def test_a_long_prompt_among_short_steps_changes_little() -> None:
    size = stepping(0.008)

    size.note(MANY, 11 * 0.008 + 0.5)

    assert size.choose(MANY) == 3


def test_an_engine_that_has_become_slower_is_known_in_the_end() -> None:
    size, now = stepping(0.001), 1.0

    for _ in range(60):
        size.note(MANY, now := now + 0.1)

    assert size.choose(MANY) == 1


def test_the_time_in_which_few_ran_is_no_step() -> None:
    size = stepping(0.1)

    size.note(1, 1.2)
    size.note(MANY, 1.2001)

    assert size.choose(MANY) == 1
