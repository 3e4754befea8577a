"""A host whose vLLM serves workers, but is older than gateways need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import ROOT, Ask, tokenyard
from tests.support.vllm_versions import write_distribution
from tokenyard.cli.up.local_yard import LocalPlan
from tokenyard.process.extras import why_no_gateway
from tokenyard.process.program import Exit

OLD = "0.26.0+cpu"


@pytest.fixture
def why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is to be said; also the packages of commands in this process."""
    write_distribution(tmp_path, OLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = why_no_gateway()
    assert f"{OLD} is installed" in told
    return told


def test_a_gateway_ends_at_once_and_says_why(why: str, tmp_path: Path) -> None:
    # Nothing listens there: the version is looked at first.
    address = ("--redis-url", "redis://127.0.0.1:1")
    done = tokenyard(*address, "gateway", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (done.returncode, done.stderr) == (Exit.USAGE, f"Error: {why}\n")


@pytest.mark.parametrize("given", [("up",), ("up", "--http-port", "0"), ("demo",)])
def test_a_yard_runs_without_a_gateway_and_says_why(
    why: str, invoke: Ask, plans: list[LocalPlan], given: tuple[str, ...]
) -> None:
    done = invoke(*given)
    assert done.output.startswith(f"No gateway: {why}.\n")
    assert given == ("demo",) or done.output.count("\n") == 1
    assert [plan.has_gateway for plan in plans] == [False]


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("given", [("--no-gateway",), ("--engine", "simulated")])
def test_up_says_nothing_where_nobody_wants_a_gateway(
    why: str, invoke: Ask, given: tuple[str, ...]
) -> None:
    assert invoke("up", *given).output == ""


def test_up_refuses_a_gateway_that_is_asked_for(why: str, invoke: Ask) -> None:
    done = invoke("up", "--gateway")
    assert done.exit_code == Exit.USAGE
    assert done.output.endswith(f"Error: --gateway: {why}\n")


@pytest.mark.usefixtures("plans")
def test_json_of_up_is_only_json(why: str, invoke: Ask) -> None:
    done = invoke("up", "--json")
    assert (done.stdout, done.stderr) == ("", f"No gateway: {why}.\n")


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_demo_answers_without_a_gateway(why: str, tmp_path: Path) -> None:
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = tokenyard("demo", "--requests", "5", timeout_s=360, env=env)
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert f"No gateway: {why}.\n" in done.stdout
    assert "API" not in done.stdout.replace(why, "")
    assert done.stdout.splitlines()[-1] == "5 answered, 5 correct"
