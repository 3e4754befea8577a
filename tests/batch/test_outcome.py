"""What a batch job tells at its end: tokens, and errors by their codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.batch.conftest import Job, bad, completion
from tests.support.processes import Plant
from tokenyard.batch.answers import read_done
from tokenyard.batch.rq.jobs import BatchQueue, JobOrder
from tokenyard.batch.state import BatchSpec, BatchUsage, CodeCount, load_state
from tokenyard.process.program import Exit
from tokenyard.protocol.errors import SettingsError


def sum_of(lines: Sequence[dict[str, Any]]) -> BatchUsage:
    used = [line["response"]["body"]["usage"] for line in lines]
    given = sum(one["prompt_tokens"] for one in used)
    made = sum(one["completion_tokens"] for one in used)
    return BatchUsage(input_tokens=given, output_tokens=made, total_tokens=given + made)


def test_a_job_of_which_every_line_fails_has_failed_for_its_caller(job: Job) -> None:
    done = job.call("run", job.write(["{broken", bad(2), bad(3)]), "-o", job.target)
    assert done.exit_code == Exit.FAILED
    assert "completed: 3 input lines = 0 results + 3 errors" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["INVALID_REQUEST", "2", "2"] in rows
    assert ["invalid_json_line", "1", "1"] in rows


def test_a_job_with_some_errors_tells_them_and_its_tokens(job: Job) -> None:
    words = ("run", job.write([completion(1), bad(2), completion(3), bad(4)]), "-o", job.target)
    done = job.call(*words)
    assert done.exit_code == Exit.OK
    used = sum_of(job.answered())
    assert used.output_tokens == 8
    assert f"tokens:  {used}\n" in done.stdout
    # The same command again, I expect to tell the same.
    assert job.call(*words).stdout == done.stdout
    batch = json.loads(job.call(*words, "--json").stdout)
    assert batch["usage"] == msgspec.to_builtins(used)
    assert batch["line_errors"] == [{"code": "INVALID_REQUEST", "lines": 2, "first_line": 2}]
    state = load_state(job.target.with_name("out.jsonl.state"))
    assert state is not None
    assert (state.usage, state.line_errors) == (used, [CodeCount("INVALID_REQUEST", 2, 2)])


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}, (5, 0, 3, 0)),
        ({"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 4}, (5, 4, 3, 0)),
        (
            {
                "prompt_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens": 3,
                "completion_tokens_details": None,
            },
            (5, 2, 3, 0),
        ),
        (
            {
                "input_tokens": 5,
                "input_tokens_details": {"cached_tokens": 2},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            (5, 2, 3, 1),
        ),
        (None, (0, 0, 0, 0)),
        ({"prompt_tokens": -1, "completion_tokens": "many"}, (0, 0, 0, 0)),
        ([], (0, 0, 0, 0)),
    ],
)
def test_tokens_are_read_by_the_names_of_each_endpoint(usage: Any, tokens: object) -> None:
    line = {"id": "batch_req_a_7", "response": {"body": {"usage": usage}}, "error": None}
    done = read_done(json.dumps(line).encode())
    assert done is not None
    assert (done.number, done.tokens) == (7, tokens)


def test_status_tells_the_tokens(plant: Plant, job: Job) -> None:
    queue = BatchQueue(plant.connection, plant.keys.yard)
    waiting = queue.find(queue.enqueue(JobOrder(spec=BatchSpec(input="/i", output="/o"))).id)
    assert json.loads(job.call("status", waiting.id, "--json").stdout)["usage"] is None
    waiting.meta["usage"] = {"input_tokens": 1234, "output_tokens": 5, "total_tokens": 1239}
    waiting.save_meta()  # type: ignore[no-untyped-call]
    found = json.loads(job.call("status", waiting.id, "--json").stdout)["usage"]
    assert found["input_tokens_details"] == {"cached_tokens": 0}
    assert "1,234 in, 5 out" in job.call("status", waiting.id).stdout
    waiting.delete()


def test_a_job_runs_for_its_tenant(plant: Plant, job: Job) -> None:
    words = ("run", job.write([completion(1)]), "-o", job.target)
    assert job.call(*words, "--tenant", "payer").exit_code == Exit.OK
    assert plant.connection.hgetall(plant.keys.tenant("payer"))
    with pytest.raises(SettingsError, match=r"tenant 'no one': use"):
        job.run(tenant="no one")
