"""`benchmarks/chaos` kills workers and gateways, and fails if it finds none."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.chaos.__main__ import main
from benchmarks.chaos.plant import Plant

pytestmark = [pytest.mark.crash, pytest.mark.long, pytest.mark.timeout(300)]
QUICK = ["--quick", "--json", "--seed", "3", "--only"]


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a failed run's history and logs in a folder of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run(part: str = "worker") -> Result:
    return CliRunner().invoke(main, [*QUICK, part, "--http" if part == "gateway" else "--no-http"])


def test_a_quick_run_kills_busy_workers() -> None:
    result = run()

    figures = json.loads(result.stdout)
    assert figures["kills_by_kind"]["worker kill"] > 0
    assert figures["recovery_p50_s"] > 0
    assert figures["of_tenants"] > 0
    assert (figures["wrong_tenant"], figures["wrong_counts"]) == (0, 0)
    assert result.exit_code == 0


def test_a_run_without_workers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a finder that recognises no process of a host
    monkeypatch.setattr(Plant, "_host_of", lambda *_: "")

    result = run()

    # I expect a failure that says so, although no promise was broken.
    figures = json.loads(result.stdout)
    assert (figures["lost"], figures["wrong"]) == (0, 0)
    assert figures["kills"] == 0
    assert figures["missed"] > 0
    assert "failed: no worker kill hit anything" in result.stderr
    assert result.exit_code == 1


@pytest.mark.vllm
def test_a_quick_run_kills_gateways_with_streams() -> None:
    result = run("gateway")

    figures = json.loads(result.stdout)
    assert figures["kills_by_kind"]["gateway kill"] > 0
    assert figures["of_tenants_over_http"] > 0
    assert (figures["wrong_tenant"], figures["wrong_counts"]) == (0, 0)
    assert figures["over_http"] > 0
    assert figures["resumed"] > 0
    assert result.exit_code == 0, result.stderr


@pytest.mark.vllm
def test_a_run_that_finds_no_gateway_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plant, "answers", lambda *_: False)

    result = run("gateway")

    assert json.loads(result.stdout)["kills"] == 0
    assert "failed: no gateway kill hit anything" in result.stderr
    assert result.exit_code == 1
