"""Spin finds the models sound, and each of their broken variants broken."""

from __future__ import annotations

import functools
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.absence import lacks

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "docs" / "model"
LUA = ROOT / "tokenyard" / "scripts" / "lua"
LIMIT_S = 600

#: Runs of docs/model/check.py with the fewest states that each must have come to: a search that
#: ends early for any reason proves nothing.
SOUND = {
    "repetition": 500_000,
    "faults": 3_000_000,
    "two-requests": 700_000,
    "trimmed": 1_000_000,
    "tenants": 300_000,
    "rest": 500_000,
}
SOUND |= {"suspects": 400_000, "suspects-two": 1_200_000, "suspects-rest": 800_000}
BROKEN = {
    "no-fence": "G2: published by a worker without a lease",
    "no-fence-by-readers": "G3: a token was repeated",
    "no-seq": "G3: a token was repeated",
    "two-step": "G1: a request is lost, or in two places",
    "hasty": "G3: a token was repeated",
    "no-dedupe": "G4: one id was taken for two requests",
    "no-tokens": "G3: a token was repeated",
    "no-search": "G1: all is quiet, and an accepted request has no result",
    "old-place": "G1: a request is lost, or in two places",
    "two-looks": "G1: a request is lost, or in two places",
    "in-company": "an innocent was convicted",
    "one-crash": "an innocent was convicted",
    "crowded": "an innocent was convicted",
}
#: A broken variant whose searches never end, and so have no final report.
ENDLESS = "no-split"
#: Answers of emit.lua that no correct caller ever gets.
NEVER_ASKED = {
    "worker %d: emit %d, seq %d, once more",
    " STALE, tokens before it are missing",
}

needs_spin = [pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture
def spin() -> None:
    """Spin and a C compiler; their absence is loud, and a failure in CI."""
    if not (shutil.which("spin") and shutil.which("gcc")):
        lacks("spin or gcc is not installed, so the model of the protocol was not checked")


@functools.cache
def check(run: str) -> dict[str, Any]:
    """The results of one run of docs/model/check.py."""
    command = [sys.executable, str(MODEL / "check.py"), "--json", run]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    return found


class TestSearches:
    pytestmark = needs_spin

    @pytest.mark.parametrize("run", SOUND)
    def test_the_model_is_sound(self, spin: None, run: str) -> None:
        found = check(run)
        assert found["errors"] == 0
        assert found["is_complete"]
        assert found["states"] > SOUND[run]

    @pytest.mark.parametrize("run", BROKEN)
    def test_a_broken_variant_is_caught(self, spin: None, run: str) -> None:
        found = check(run)
        assert found["errors"] > 0
        assert found["trail"][-1] == BROKEN[run]

    def test_entries_deleted_by_hand_are_found(self, spin: None) -> None:
        unreached = set(check("trimmed")["unreached"])
        assert not {said for said in unreached if "stranger" in said or "nowhere" in said}

    def test_entries_move_to_their_tenants(self, spin: None) -> None:
        assert not [said for said in check("tenants")["unreached"] if "tenant" in said]

    def test_a_search_that_never_ends_is_caught(self, spin: None) -> None:
        assert check(ENDLESS)["errors"] > 0

    def test_every_step_of_the_search_is_reached(self, spin: None) -> None:
        assert check("suspects")["unreached"] == ["an innocent was convicted"]

    def test_every_answer_of_every_script_is_reached(self, spin: None) -> None:
        # A step that can never be taken would make any promise easy to keep.
        unreached = set(check("repetition")["unreached"])
        assert {said for said in unreached if not re.match(r"G\d:", said)} == NEVER_ASKED


def scripts() -> set[str]:
    return {path.stem for path in LUA.glob("*.lua")}


def modelled() -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in MODEL.glob("*.pml"))
    return set(re.findall(r"(?<=[-,] )(\w+)\.lua", text))


def left_out() -> set[str]:
    """Scripts in the README's list of those that are not modelled."""
    text = (MODEL / "README.md").read_text(encoding="utf-8")
    told = text.partition("Scripts that are no step of the model:")[2].partition("\n## ")[0]
    return set(re.findall(r"[:,]\s+`(\w+)`", told))


def test_each_script_is_modelled_or_left_out_for_a_reason() -> None:
    forgotten = scripts() - modelled() - left_out()
    assert not forgotten, "model it, or give a reason in docs/model/README.md, 'Not modelled'"


def test_the_model_knows_no_other_scripts() -> None:
    assert modelled() | left_out() <= scripts()
    assert not modelled() & left_out()


def test_each_variant_in_the_readme_is_one_that_is_run() -> None:
    readme = (MODEL / "README.md").read_text(encoding="utf-8")
    for run, broken in BROKEN.items():
        assert f"### {run}\n" in readme
        assert broken in readme.partition(f"### {run}\n")[2].partition("###")[0]


def test_each_everyday_run_is_tested() -> None:
    runs = runpy.run_path(str(MODEL / "check.py"))["RUNS"]
    assert {*SOUND, *BROKEN, ENDLESS} == {run.name for run in runs if not run.is_deep}


def test_a_misspelt_run_is_not_a_run_of_nothing() -> None:
    command = [sys.executable, str(MODEL / "check.py"), "repetitoin"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "no such run: repetitoin" in done.stderr
