"""Entries of the history: what is written is read, and garbage is nothing."""

from __future__ import annotations

from tests.support.builders import stored
from tokenyard.protocol.leader_reports import HistorySample, history_fields, parse_history


def test_a_sample_is_read_as_it_was_written() -> None:
    sample = HistorySample(
        at_ms=5_000,
        waiting=dict.fromkeys(("retry", "high", "normal", "low"), 0),
        epoch=2,
        running=3,
        workers=5,
        ready=4,
        seconds=9.875,
        finished=11,
        failed=1,
        tokens=500,
        dead=1,
        ttft=[0, 0, 3],
        wait=[9],
    )

    assert parse_history("5000-0", stored(history_fields(sample))) == sample
    assert sample.requests_per_s == 11 / 9.875


def test_what_cannot_be_read_is_nothing() -> None:
    bad = {
        b"seconds": b"nan",
        b"finished": b"-3",
        b"tokens": b"many",
        b"ttft": b'["a"]',
        b"wait": b"{}",
        b"waiting:high": b"\xff",
        b"\xff": b"1",
    }

    found = parse_history("7-1", bad)
    assert (found.at_ms, found.seconds, found.finished, found.tokens) == (7, 0.0, 0, 0)
    assert (list(found.ttft), list(found.wait), found.waiting["high"]) == ([], [], 0)
    assert found.requests_per_s == found.tokens_per_s == 0.0
