"""Parts of the GPU proof: bounded, ended with everything they started, and reported."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gpu_parts import TESTS, Result
from gpu_report import report
from gpu_wheels import ROOT

from tests.support.processes import is_gone

#: Seconds: the bound of parts.
LONG_S = 60.0
#: That of parts that shall reach it; the second where they have taken so long to start.
PATIENCE_S = (10.0, 60.0)

#: The runner adopts orphaned processes; the tests' own process must not.
RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import gpu_parts
gpu_parts._GRACE_S = 1.0
state, timeout_s, *command = sys.argv[1:]
result = gpu_parts.bounded("fake", command, Path(state), dict(__import__("os").environ),
                           timeout_s=float(timeout_s))
print(json.dumps(asdict(result)))
"""


def run(state: Path, code: str, timeout_s: float = LONG_S) -> Result:
    command = [sys.executable, "-c", RUN, str(state), str(timeout_s), sys.executable, "-c"]
    done = subprocess.run(
        [*command, textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT / ".ci")},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return Result(**json.loads(done.stdout))


def test_a_part_that_passes_returns_its_last_json(tmp_path):
    result = run(tmp_path, 'print("{\\"a\\": 0}\\nwords\\n{\\n \\"tokens_per_s\\": 7.5\\n}")')

    assert (result.outcome, result.exit) == ("passed", 0)
    assert result.figures == {"tokens_per_s": 7.5}
    assert "words" in (tmp_path / "logs" / "fake.log").read_text()


def test_a_part_that_fails_reports_its_status_and_its_last_lines(tmp_path):
    result = run(tmp_path, 'print("out of memory"); raise SystemExit(3)')

    assert (result.outcome, result.exit) == ("failed", 3)
    assert result.why == "It ended with status 3."
    assert result.last_lines == ["out of memory"]


@pytest.mark.long
def test_a_part_that_hangs_is_ended_with_all_its_processes(tmp_path):
    for patience_s in PATIENCE_S:
        result = run(
            tmp_path,
            """
            import os, signal, subprocess, sys, time
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            child = [sys.executable, "-c", "import time; time.sleep(1000)"]
            print(os.getpid(), subprocess.Popen(child, start_new_session=True).pid, flush=True)
            time.sleep(1000)
            """,
            patience_s,
        )
        if result.last_lines:
            break

    assert (result.outcome, result.exit) == ("ended", None)
    assert result.why == f"It ran longer than its {patience_s:g} s and was ended."
    for pid in map(int, result.last_lines[0].split()):
        assert is_gone(pid)


@pytest.mark.long
def test_tests_that_are_ended_have_reported_earlier_failures(tmp_path):
    tests = """
        import time
        def test_good(): pass
        def test_bad(): assert "memory" == "the baseline"
        def test_hangs(): time.sleep(1000)
    """
    (tmp_path / "test_three.py").write_text(textwrap.dedent(tests))
    options = ["-q", "-p", "gpu_pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    options += ["-c", "/dev/null", "-o", "timeout=0", "-o", "addopts=", str(tmp_path)]

    log = tmp_path / "logs" / "fake.log"
    for patience_s in PATIENCE_S:
        result = run(
            tmp_path,
            f"""
            import os, pytest, signal
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os._exit(pytest.main({options!r}))
            """,
            patience_s,
        )
        said = log.read_text()
        if "test_bad" in said:
            break

    assert result.outcome == "ended"
    assert re.search(r"^passed after [0-9.]+ s: test_three\.py::test_good$", said, re.MULTILINE)
    assert re.search(r"^failed after [0-9.]+ s: test_three\.py::test_bad$", said, re.MULTILINE)
    assert "AssertionError: assert 'memory' == 'the baseline'" in said


def test_every_gpu_test_is_in_one_part():
    there = sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))

    assert sorted(f"test_{name}" for names in TESTS.values() for name in names) == there


def test_a_report_shows_failed_ended_and_missing_parts(tmp_path):
    installed = {"vllm": "vllm 0.26.0", "torch": "2.11.0", "left_out": ["vllm/fa2.so"]}
    Result("install", "passed", 9.0, figures=installed).write(tmp_path)
    Result(
        "tests", "failed", 5.0, exit=1, why="It ended with status 1.", last_lines=["E boom"]
    ).write(tmp_path)
    Result("chaos", "ended", 480.0, leftovers=[], figures={"lost": 0}).write(tmp_path)
    figures = {"rounds": [{"tokens_per_s": 1234.5678}], "ttft_ms": [5, 1, 2, 3, 4]}
    Result("cold_start", "passed", 30.0, quick=True, figures=figures).write(tmp_path)

    passed = report(tmp_path, ["tests", "chaos", "cold_start", "alternate"], "cuda")

    assert not passed
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["outcome"] for part in told["parts"]] == [
        "passed",
        "failed",
        "ended",
        "passed",
        "not run",
    ]
    text = (tmp_path / "gpu.md").read_text()
    for line in (
        "| vllm | vllm 0.26.0 |",
        "| left out of the wheels | fa2.so |",
        "| tests | failed | 5 |  |",
        "| cold_start | passed, quick | 30 |  |",
        "| alternate | not run |  |  |",
        "| rounds.0.tokens_per_s | 1235 |",
        "| ttft_ms | 3 (median of 5) |",
        "E boom",
    ):
        assert line in text.splitlines()
