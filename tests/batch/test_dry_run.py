"""`tokenyard batch run --dry-run`: checks a file and runs no request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.batch.conftest import WriteLines, completion
from tests.batch.running import batch
from tests.support.processes import ROOT, Plant
from tests.unit.client.test_build import Bytes
from tokenyard.batch.dry_run import Fleet, dry_run
from tokenyard.batch.state import BatchSpec
from tokenyard.process.program import Exit

ADDER = ROOT / "examples/arithmetic/models/adder"


def spec_of(path: Path) -> BatchSpec:
    return BatchSpec(input=str(path), output="-")


def test_faults_are_reported_with_their_lines(write_lines: WriteLines) -> None:
    source = write_lines(
        "in.jsonl",
        [
            completion(1, prompt="abc"),
            "{broken",
            completion(1),
            completion(2, temperature=-1),
            completion(3, model="unknown"),
            completion(4, prompt="x" * 100),
            {"id": "chat", "messages": [{"role": "user", "content": "hi"}], "model": "known"},
        ],
    )
    fleet = Fleet(models=frozenset({"known"}), max_model_len=64, lines_per_s=0.5)
    report = dry_run(spec_of(source), fleet, Bytes())
    assert (report.lines, report.good, report.bad) == (7, 2, 5)
    assert {fault.line: fault.code for fault in report.faults} == {
        2: "invalid_json_line",
        3: "duplicate_custom_id",
        4: "INVALID_REQUEST",
        5: "MODEL_UNAVAILABLE",
        6: "prompt_too_long",
    }
    assert report.forms == {"completion": 1, "chat": 1}
    # I expect tokens of all prompts, also of the too long one,
    assert report.tokens is not None
    assert (report.tokens.prompts, report.tokens.least, report.tokens.most) == (3, 2, 100)
    assert report.tokens.below == {4: 2, 128: 1}
    # of a chat only its text,
    assert any("chat template" in note for note in report.notes)
    assert report.most_new_tokens == 4 + 16
    # and the time for the good lines.
    assert report.estimate_s == 4.0


def test_faults_beyond_a_limit_are_only_counted(write_lines: WriteLines) -> None:
    report = dry_run(spec_of(write_lines("in.jsonl", ["{"] * 300)), Fleet(), None)
    assert (report.bad, len(report.faults)) == (300, 100)
    assert report.codes == {"invalid_json_line": 300}


def test_the_command_reads_the_yard_and_runs_no_request(
    plant: Plant, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(1), completion(2, model="other"), "{broken"])
    done = batch(plant, "run", source, "--dry-run")
    assert done.returncode == Exit.FAILED, done.stderr
    assert "3 lines: 1 valid (1 completion), 2 invalid" in done.stdout
    assert "line 2: MODEL_UNAVAILABLE: the yard has no model 'other'" in done.stdout
    assert "line 3: invalid_json_line" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.long
def test_the_command_counts_with_a_tokenizer(plant: Plant, write_lines: WriteLines) -> None:
    source = write_lines("in.jsonl", [completion(n, prompt=f"{n}+1=") for n in range(10, 20)])
    done = batch(plant, "run", source, "--dry-run", "--tokenizer", ADDER, "--json")
    assert done.returncode == Exit.OK, done.stderr
    report = json.loads(done.stdout)
    assert report["good"] == report["tokens"]["prompts"] == 10
    assert sum(report["tokens"]["below"].values()) == 10
