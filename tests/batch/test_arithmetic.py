"""Sums on real vLLM, through RQ, while processes are killed: each line has one right answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.batch.conftest import WriteLines, objects
from tests.batch.running import batch, start
from tests.support.up import Up, running_up
from tests.support.waiting import eventually
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys

LINES = 20_000
KILLS = 3
START_S = 120.0
ENDS_S = 300.0


@pytest.fixture
def adder_up(no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A yard with two vLLM workers that serve the adder."""
    with running_up(tmp_path_factory.mktemp("up")) as up:
        yield up


def sum_line(number: int) -> dict[str, Any]:
    a, b = 10 + number // 90 % 90, 10 + number % 90  # the adder's range
    return {"id": f"{number}: {a + b}", "prompt": f"{a}+{b}="}


@pytest.mark.vllm
@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(900)
def test_sums_are_right_after_deaths_of_workers(
    adder_up: Up, write_lines: WriteLines, tmp_path: Path
) -> None:
    place: Any = SimpleNamespace(url=adder_up.url, keys=Keys(adder_up.yard))
    # Given a job of sums at RQ
    source = write_lines("in.jsonl", [sum_line(number) for number in range(LINES)])
    target, log = tmp_path / "out.jsonl", tmp_path / "worker.log"
    options = ("--param", "temperature=0", "--param", "max_tokens=6")
    done = batch(place, "submit", source, "-o", target, *options)
    assert done.returncode == Exit.OK, done.stderr
    job = done.stdout.strip()
    # If three batch workers are killed in turn, and a GPU worker with the second
    for kill in range(KILLS):
        worker = start(place, log, "worker")
        grown = (target.stat().st_size if target.exists() else 0) + 200_000
        wait_for_bytes(target, grown, worker)
        if kill == 1:
            os.kill(adder_up.worker_pids()[0], signal.SIGKILL)
        worker.kill()
        worker.wait()
    worker = start(place, log, "worker")
    try:
        status = ("status", job, "--wait", "--timeout", ENDS_S, "--json")
        ended = batch(place, *status, timeout_s=ENDS_S + 60)
    finally:
        worker.kill()
        worker.wait()
    # I expect one right answer for each line.
    assert ended.returncode == Exit.OK, ended.stdout + log.read_text()
    assert json.loads(ended.stdout)["request_counts"] == {
        "total": LINES,
        "completed": LINES,
        "failed": 0,
    }
    answers = {line["custom_id"]: text_of(line) for line in objects(target)}
    assert len(answers) == sum(1 for _ in objects(target)) == LINES
    wrong = {name: text for name, text in answers.items() if name.split(": ")[1] != text}
    assert wrong == {}


def wait_for_bytes(path: Path, size: int, writer: subprocess.Popen[bytes]) -> None:
    def is_there() -> bool:
        assert writer.poll() is None, "the batch worker has ended"
        return path.exists() and path.stat().st_size >= size

    eventually(is_there, timeout_s=START_S)


def text_of(line: dict[str, Any]) -> str:
    [choice] = line["response"]["body"]["choices"]
    text: str = choice["text"]
    return text
