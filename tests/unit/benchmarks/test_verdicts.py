"""When benchmarks fail: also if they have tried nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from benchmarks import fuzz
from benchmarks.routing import __main__ as routing
from benchmarks.yard import Yard

FUZZED = {**dict.fromkeys(fuzz.BAD, 0), **dict.fromkeys(fuzz.TRIED, 1)}
GOOD = FUZZED | {"next_good_request": "completed"}


def test_a_sound_fuzz_run_passes() -> None:
    assert list(fuzz.faults(GOOD)) == []


@pytest.mark.parametrize("name", fuzz.BAD)
def test_a_finding_fails_a_fuzz_run(name: str) -> None:
    assert list(fuzz.faults(GOOD | {name: 2})) == [f"{name}: 2"]


@pytest.mark.parametrize("name", fuzz.TRIED)
def test_a_fuzz_run_without_the_required_tries_fails(name: str) -> None:
    assert list(fuzz.faults(GOOD | {name: 0})) == [f"{name}: none, so nothing was tried"]


def test_the_last_request_of_a_fuzz_run_must_complete() -> None:
    assert list(fuzz.faults(GOOD | {"next_good_request": "failed"}))


def test_a_child_that_has_ended_is_missing_before_its_status_is_read() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as child:
        child.stdout.read()  # until it has ended
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        yard = Yard("redis://nowhere", "yard", {"coordinator": [child.pid], "me": [os.getpid()]})

        assert yard.missing() == 1
    assert yard.missing() == 1


@pytest.mark.parametrize("option", ["--policies", "--loads"])
def test_a_misspelt_choice_is_refused(option: str) -> None:
    result = CliRunner().invoke(routing.main, [option, "round_robbin"])

    assert result.exit_code == 2
    assert "round_robbin: known are" in result.stderr


def test_an_empty_choice_fails() -> None:
    result = CliRunner().invoke(routing.main, ["--quick", "--loads", "", "--policies", ""])

    assert result.exit_code == 1
