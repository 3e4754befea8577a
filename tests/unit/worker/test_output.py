"""The output of a process: passed on line by line, its end kept, a crash kept apart."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from worker.host.output import Output


class Written:
    """The standard error of a process, written by the test."""

    def __init__(self) -> None:
        ours, self.pipe = multiprocessing.Pipe(duplex=False)
        self.output = Output(ours)

    def write(self, data: bytes) -> None:
        os.write(self.pipe.fileno(), data)
        self.output.pass_on()


@pytest.fixture
def written() -> Iterator[Written]:
    one = Written()
    yield one
    one.pipe.close()
    one.output.close()


def test_whole_lines_are_passed_on(written: Written, capfd: pytest.CaptureFixture[str]) -> None:
    written.write(b"one\ntw")
    assert capfd.readouterr().err == "one\n"
    written.write(b"o\nthree")
    assert capfd.readouterr().err == "two\n"
    assert list(written.output.lines) == ["one", "two"]

    written.pipe.close()
    written.output.pass_on()
    assert written.output.pipe is None, "nothing more can come"
    assert capfd.readouterr().err == "three\n"
    assert written.output.lines[-1] == "three"


def test_a_read_does_not_wait(written: Written) -> None:
    written.output.pass_on()
    assert isinstance(written.output.pipe, Connection)


def test_only_the_end_is_kept(written: Written) -> None:
    for number in range(1000):
        written.write(b"%d\n" % number)
    assert written.output.lines[-1] == "999"
    assert len(written.output.lines) == 100


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_crash_is_kept_apart_and_shown_at_debug_level(
    written: Written,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    level: int,
) -> None:
    caplog.set_level(level, "tokenyard.worker.pool")
    written.write(b'word\nFatal Python error: Illegal instruction\n\n  File "a.py", line 1 in f\n')
    assert list(written.output.lines) == ["word"]
    assert written.output.crash[-1].strip() == 'File "a.py", line 1 in f'
    assert ("Fatal" in capfd.readouterr().err) is (level == logging.DEBUG)


@pytest.mark.parametrize("more", [b"more\n", b"." * 50_000], ids=["lines", "no end of line"])
def test_a_process_that_never_stops_writing_does_not_hold_its_reader(
    written: Written, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    # Given a process that writes more after each read
    monkeypatch.setattr("worker.host.output.os.read", lambda *_: more)
    # I expect the reader to return with some of it, and the rest to be read later.
    written.output.pass_on()
    assert written.output.lines
    assert written.output.pipe is not None


def test_what_the_next_process_writes_is_no_part_of_a_crash(written: Written) -> None:
    written.write(b"word\nFatal Python error: Aborted\n")
    written.output.begin_again()
    written.write(b"more\n")
    assert (list(written.output.lines), list(written.output.crash)) == (["more"], [])
