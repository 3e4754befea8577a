"""Which requests a crash makes suspects, the size of their next trial, and when a trial ends."""

from __future__ import annotations

import pytest

from coordinator.routing.suspicion import (
    PARTS,
    UNMARKED,
    CrashAnalysis,
    QuarantineMark,
    TrialMember,
    has_survived,
    next_trial,
    read_mark,
)
from tokenyard.protocol.settings import CoordinatorSettings

PATIENCE = CoordinatorSettings(redis_url="redis://x")


class TestMarks:
    @pytest.mark.parametrize(
        ("raw", "mark", "is_open"),
        [
            (None, UNMARKED, True),
            (b"-", QuarantineMark("-"), True),
            (b"5-0", QuarantineMark("5-0"), False),
            (b"5-0+16", QuarantineMark("5-0+16", "5-0", 16), False),
            (b"5-0+x", QuarantineMark("5-0+x"), False),
            (b"+3", QuarantineMark("+3"), False),
            (b"\xff", QuarantineMark("\ufffd"), False),
        ],
    )
    def test_a_quarantine_mark_is_read(
        self, raw: bytes | None, mark: QuarantineMark, is_open: bool
    ) -> None:
        assert read_mark(raw) == mark
        assert mark.is_open is is_open

    def test_a_group_is_its_first_entry_and_all_after_it(self) -> None:
        mark = read_mark(b"10-2+3")
        covered = [mark.covers(entry) for entry in ("9-7", "10-1", "10-2", "10-10", "11-0")]
        assert covered == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("suspects", "expected"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 1), (8, 2), (64, 16), (65, 16)]
)
def test_groups_become_smaller_with_each_crash(suspects: int, expected: int) -> None:
    assert next_trial(suspects) == expected


@pytest.mark.parametrize("suspects", [1, 2, 3, 64, 1000, 100_000])
def test_few_crashes_lead_from_many_to_one_alone(suspects: int) -> None:
    crashes, left = 0, suspects
    while left:
        left, crashes = next_trial(left), crashes + 1
    assert PARTS ** (crashes - 2) <= suspects


def entries(count: int) -> list[str]:
    return [f"{n}-0" for n in range(1, count + 1)]


class TestCrashAnalysis:
    @pytest.mark.parametrize(
        ("mark", "length", "max_num_seqs", "trials"),
        [
            pytest.param(None, 6, 4, [1] * 4 + [None] * 2, id="what the engine had started"),
            pytest.param(b"3-0+8", 10, 100, [None] * 2 + [2] * 8, id="the group on trial"),
            pytest.param(b"1-0", 1, 9, [0], id="alone already"),
            pytest.param(None, 1, 9, [0], id="the only request"),
            pytest.param(b"-", 8, 9, [2] * 8, id="a kept lane"),
        ],
    )
    def test_suspects_of_a_crash_and_the_size_of_their_trial(
        self, mark: bytes | None, length: int, max_num_seqs: int, trials: list[int | None]
    ) -> None:
        analysis = CrashAnalysis(read_mark(mark), length=length, max_num_seqs=max_num_seqs)

        assert analysis.trials(entries(length)) == trials

    def test_a_crash_is_analysed_in_several_turns_as_in_one(self) -> None:
        inquest, lane = CrashAnalysis(UNMARKED, length=100, max_num_seqs=70), entries(100)

        assert inquest.trials(lane[:60]) + inquest.trials(lane[60:]) == [17] * 70 + [None] * 30


def member(**fields: object) -> TrialMember:
    known: dict[str, object] = {"attempt": 2, "streams": True, "published": 10, "began_ms": 0.0}
    return TrialMember(client="c", id="i", **(known | fields))  # type: ignore[arg-type]


class TestSurvival:
    @pytest.mark.parametrize(("published", "expected"), [(10, False), (17, False), (18, True)])
    def test_a_stream_survives_by_publishing_enough_tokens(
        self, published: int, expected: bool
    ) -> None:
        assert has_survived(member(), published, 1.0, PATIENCE) is expected

    def test_a_stream_without_tokens_survives_in_the_end(self) -> None:
        assert not has_survived(member(), 10, 59_000.0, PATIENCE)
        assert has_survived(member(), 10, 60_000.0, PATIENCE)

    @pytest.mark.parametrize(
        ("ran_ms", "needs_ms"), [(0.0, 5000.0), (100.0, 700.0), (99_000.0, 5000.0)]
    )
    def test_a_request_without_a_stream_survives_by_running_longer(
        self, ran_ms: float, needs_ms: float
    ) -> None:
        one = member(streams=False, ran_ms=ran_ms)
        assert not has_survived(one, 0, needs_ms - 1, PATIENCE)
        assert has_survived(one, 0, needs_ms, PATIENCE)

    def test_a_wrongly_acquitted_request_has_to_run_longer(self) -> None:
        assert not has_survived(member(relapsed=2), 41, 1.0, PATIENCE)
        assert has_survived(member(relapsed=2), 42, 1.0, PATIENCE)
        other = member(streams=False, relapsed=1, ran_ms=99_000.0)
        assert not has_survived(other, 0, 9_999.0, PATIENCE)
        assert has_survived(other, 0, 10_000.0, PATIENCE)
