"""`tokenyard bench` against a running yard."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis
from click.testing import Result

from tests.cli.running import environment, tokenyard
from tests.support.waiting import eventually
from tokenyard.admin.snapshot import read_yard
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys

Ask = Callable[..., Result]
SHORT = ("--prompt-tokens", "8", "--max-tokens", "5")


def on_lanes(connection: redis.Redis) -> int:
    """The number of requests on the workers' lanes."""
    return sum(worker.lane for worker in read_yard(connection, Keys("main")).workers)


def measured(url: str, *options: str) -> dict[str, Any]:
    done = tokenyard("--redis-url", url, "bench", *SHORT, "--json", *options)
    assert done.returncode == Exit.OK, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.long
def test_bench_measures_streams(yard: dict[str, Any]) -> None:
    result = measured(yard["url"], "--requests", "30", "--concurrency", "7", "--stream")

    assert (result["completed"], result["failed"], result["errors"]) == (30, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (240, 150)
    assert (result["model"], result["max_concurrency"]) == ("simulated", 7)
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert result["request_throughput"] == pytest.approx(30 / result["duration"], rel=0.01)


@pytest.mark.long
def test_bench_keeps_its_rate(yard: dict[str, Any]) -> None:
    result = measured(yard["url"], "--requests", "20", "--rate", "40")

    # I expect random gaps of 25 ms to add up, and no time to first token without a stream
    assert result["duration"] > 0.1
    assert (result["request_rate"], result["max_concurrency"]) == (40.0, None)
    assert "p50_ttft_ms" not in result


def test_bench_prints_a_table_by_default(ask: Ask) -> None:
    done = ask("bench", "--requests", "3", *SHORT)

    assert done.exit_code == Exit.OK, done.output
    assert "Successful requests:                     3" in done.stdout
    assert "Output token throughput (tok/s):" in done.stdout


def test_failed_requests_set_the_exit_status(ask: Ask) -> None:
    done = ask("bench", "--requests", "3", *SHORT, "--warm-up", "0", "--model", "nobody", "--json")

    assert done.exit_code == Exit.FAILED
    assert json.loads(done.stdout)["errors"] == {"MODEL_UNAVAILABLE": 3}


def test_bench_stops_if_the_warm_up_fails(ask: Ask) -> None:
    done = ask("bench", "--requests", "3", "--model", "nobody")

    assert done.exit_code == Exit.FAILED
    assert "served: simulated" in done.stderr
    assert done.stdout == ""


@pytest.mark.long
def test_an_interrupted_bench_prints_its_figures_and_cancels_its_requests(
    yard: dict[str, Any],
) -> None:
    command = [sys.executable, "-m", "tokenyard", "--redis-url", yard["url"], "bench"]
    command += ["--requests", "1000000", "--max-tokens", "50", "--json"]
    with (
        redis.Redis.from_url(yard["url"]) as connection,
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process,
    ):
        try:
            eventually(lambda: on_lanes(connection) > 10)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=100)
        finally:
            process.kill()
        eventually(lambda: on_lanes(connection) == 0)

    assert process.returncode == Exit.INTERRUPTED
    assert json.loads(output)["num_prompts"] == 1_000_000


def test_bench_without_a_yard_is_unavailable(invoke: Ask) -> None:
    assert invoke("--redis-url", "redis://127.0.0.1:1", "bench").exit_code == Exit.UNAVAILABLE
