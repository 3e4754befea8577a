"""Files of lines: compression by name, torn ends, long lines, and scans of inputs."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from tests.batch.conftest import zstd
from tokenyard.batch.api import spec_of
from tokenyard.batch.files import LineNumbers, UnreadableFile, cut_torn_end, member, read_lines
from tokenyard.batch.lines import BadLine, parse_line
from tokenyard.batch.opening import open_job, scan_input
from tokenyard.batch.state import BatchSpec
from tokenyard.protocol.errors import SettingsError

NAMES = ["a.jsonl", "a.jsonl.gz", pytest.param("a.jsonl.zst", marks=zstd)]


@pytest.mark.parametrize("name", NAMES)
def test_appended_lines_are_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("ab") as file:
        for text in (b"one\ntwo\n", b"three\n"):
            file.write(member(path, text))
    assert list(read_lines(path)) == [(1, b"one"), (2, b"two"), (3, b"three")]
    assert cut_torn_end(path) == 0


@pytest.mark.parametrize("before", [b"one\ntwo\n", b""])
@pytest.mark.parametrize("name", NAMES)
def test_a_torn_last_line_is_cut_off(tmp_path: Path, name: str, before: bytes) -> None:
    # Given a file with a partial last write
    path = tmp_path / name
    whole, last = before and member(path, before), member(path, b"three\n")
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        # If its end is cut, I expect the earlier whole lines.
        assert cut_torn_end(path) == length
        assert path.read_bytes() == whole


def test_blank_lines_only_count_as_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo")
    assert list(read_lines(path)) == [(1, b"one"), (4, b"two")]


def test_a_too_long_line_is_skipped_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\n" + b"x" * 1000 + b"\nthree\n")
    assert list(read_lines(path, max_bytes=100)) == [(1, b"one"), (2, None), (3, b"three")]


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_truncated_compressed_file_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(member(path, os.urandom(1000).hex().encode())[:-9])
    with pytest.raises(UnreadableFile, match="truncated"):
        list(read_lines(path))


def test_a_file_compressed_by_another_program_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    with gzip.open(path, "wb") as file:
        file.write(b"one\n" * 100_000)
    assert sum(1 for _ in read_lines(path)) == 100_000


def test_a_missing_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="no-such-file"):
        scan_input(spec_of(tmp_path / "no-such-file", "out.jsonl", {}))


def test_input_scan_counts_lines_and_finds_repeated_ids(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"custom_id":"a"}\n\n{"id":"b"}\n{broken\n{"id":"a"}\n{"id":1}\n{"id":"1"}\n')
    found = scan_input(spec_of(path, "out.jsonl", {}))
    assert found.lines == 6
    assert [number for number in range(10) if number in found.repeated] == [5, 7]


def test_a_line_of_nested_arrays_is_only_a_bad_line(tmp_path: Path) -> None:
    path, nested = tmp_path / "in.jsonl", b"[" * 1000 + b"]" * 1000
    path.write_bytes(b'{"id":"a","prompt":' + nested + b'}\n{"id":"b","prompt":"1+1="}\n')

    assert scan_input(spec_of(path, "out.jsonl", {})).lines == 2
    assert parse_line(1, b'{"id":"a","prompt":' + nested + b"}").__class__ is BadLine


def test_line_numbers_hold_any_set_of_numbers() -> None:
    marks = LineNumbers()
    numbers = [0, 7, 8, 100_000, 3, 99_999]
    assert all(marks.add(number) for number in numbers)
    assert not any(marks.add(number) for number in numbers)
    assert len(marks) == len(numbers)
    assert [number for number in range(100_010) if number in marks] == sorted(numbers)


@pytest.mark.parametrize(
    ("output", "errors", "told"),
    [
        ("in.jsonl", "", "input and output"),
        ("soft.jsonl", "", "input and output"),
        ("hard.jsonl", "", "input and output"),
        ("folder/in.jsonl", "", "input and output"),
        ("sub/../in.jsonl", "", "input and output"),
        ("out.jsonl", "soft.jsonl", "input and errors"),
        ("new.jsonl", "folder/new.jsonl", "output and errors"),
        ("out.jsonl", "out.jsonl.state", "errors and the state of the job"),
        ("out.jsonl", "out.jsonl.log", "errors and the log of the job"),
        ("all", "", "input and the state of the job"),
    ],
)
def test_no_two_files_of_a_job_are_one(tmp_path: Path, output: str, errors: str, told: str) -> None:
    # Given an input with other names, and a folder with another name
    given = tmp_path / "in.jsonl"
    given.write_text('{"prompt":"1+1="}\n')
    (tmp_path / "soft.jsonl").symlink_to(given)
    (tmp_path / "hard.jsonl").hardlink_to(given)
    (tmp_path / "all.state").symlink_to("soft.jsonl")
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "sub").mkdir()

    spec = BatchSpec(
        input=str(given),
        output=str(tmp_path / output),
        errors=str(tmp_path / errors) if errors else "",
    )
    with (
        pytest.raises(SettingsError, match=f"{told}: .* are the same file"),
        open_job(spec, overwrite=True),
    ):
        pass

    assert given.read_text() == '{"prompt":"1+1="}\n'
