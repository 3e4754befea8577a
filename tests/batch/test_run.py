"""Whole batch jobs on a simulated yard."""

from __future__ import annotations

import asyncio
import io
import re
from typing import Any

import pytest
from rich.console import Console

from tests.batch.conftest import Job, WriteLines, bad, completion, objects, zstd
from tests.support.processes import Plant
from tests.support.servers import free_port
from tokenyard.batch import (
    Batch,
    BatchBroken,
    BatchState,
    OutputInUse,
    UnreadableFile,
    stream_batch,
)
from tokenyard.batch.asking import by_client
from tokenyard.batch.runner import LineCount, Runner
from tokenyard.batch.state import RequestCounts, load_state
from tokenyard.cli.batch.run import _shown
from tokenyard.protocol.errors import InvalidRequest, NoCoordinator, SettingsError

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {
    "custom_id": "chat",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": HELLO, "max_tokens": 3},
}


def counts(state: BatchState) -> tuple[int, int, int]:
    return state.counts.total, state.counts.completed, state.counts.failed


@pytest.mark.parametrize("suffix", ["", ".gz", pytest.param(".zst", marks=zstd)])
def test_every_line_gets_its_answer(job: Job, suffix: str) -> None:
    lines = [completion(number) for number in range(300)]
    job.source = job.source.with_name(f"in.jsonl{suffix}")
    job.target = job.target.with_name(f"out.jsonl{suffix}")
    state = job.run(lines)
    assert state.status == "completed"
    assert counts(state) == (300, 300, 0)
    found = job.answered()
    assert sorted(line["custom_id"] for line in found) == sorted(
        line["custom_id"] for line in lines
    )
    assert all(line["error"] is None for line in found)
    assert objects(job.errors) == []


def test_a_job_continues_if_its_count_cannot_be_sent(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a count that cannot be sent
    count = LineCount(f"redis://127.0.0.1:{free_port()}", plant.keys.yard)
    done = RequestCounts(total=9, completed=5)
    count.advance(RequestCounts(), done)

    # I expect it to be sent with the next one.
    before = plant.connection.hget(plant.keys.tally, "count:lines:completed")
    monkeypatch.setattr(count, "_url", plant.url)
    count.advance(done, RequestCounts(total=9, completed=6))
    after = plant.connection.hget(plant.keys.tally, "count:lines:completed")
    assert int(after or 0) - int(before or 0) == 6


def test_answers_have_the_form_of_the_batch_api(job: Job) -> None:
    plain = {"id": "plain", "tokens": [1, 2, 3], "max_tokens": 2}
    state = job.run([completion(1, n=2), CHAT, plain])
    found = {line["custom_id"]: line for line in job.answered()}
    two = found["line-1"]["response"]
    assert two["status_code"] == 200
    assert two["body"]["object"] == "text_completion"
    assert [choice["index"] for choice in two["body"]["choices"]] == [0, 1]
    assert [len(choice["text"]) for choice in two["body"]["choices"]] == [4, 4]
    assert two["body"]["usage"]["completion_tokens"] == 8
    assert two["body"]["provenance"]["engine"] == "simulated"
    [message] = found["chat"]["response"]["body"]["choices"]
    assert message["message"]["role"] == "assistant"
    assert len(message["message"]["content"]) == 3
    assert message["finish_reason"] == "length"
    [tokens] = found["plain"]["response"]["body"]["choices"]
    assert len(tokens["token_ids"]) == 2
    assert found["plain"]["id"] == f"batch_req_{state.id.removeprefix('batch_')}_3"


def test_bad_lines_are_errors_and_affect_no_other_line(job: Job) -> None:
    lines = [
        completion(1),
        "{broken",
        completion(1),  # a repeated id
        bad(2),
        completion(3, model="unknown"),
        completion(4, prompt=""),
        {**completion(5), "url": "/v1/embeddings"},
        completion(6, prompt="x" * 10_000, max_tokens=1),
    ]
    state = job.run(lines)
    assert state.status == "completed"
    assert counts(state) == (8, 1, 7)
    found = {line["error"]["line"]: line for line in objects(job.errors)}
    assert {number: line["error"]["code"] for number, line in found.items()} == {
        2: "invalid_json_line",
        3: "duplicate_custom_id",
        4: "INVALID_REQUEST",
        5: "MODEL_UNAVAILABLE",
        6: "INVALID_REQUEST",
        7: "invalid_line",
        8: "INVALID_REQUEST",
    }
    assert found[2]["response"] is None
    assert found[4]["response"]["status_code"] == 400
    assert "temperature" in found[4]["response"]["body"]["error"]["message"]
    # As over HTTP: a yard may come to have the model, and the message says which it has.
    assert found[5]["response"]["status_code"] == 503
    assert found[5]["response"]["body"]["error"]["type"] == "service_unavailable_error"


def test_ordered_answers_have_the_order_of_the_lines(job: Job) -> None:
    # Given lines of very different lengths, some of them bad
    lines = [completion(number, max_tokens=1 + number * 37 % 200) for number in range(200)]
    for number in range(5, 200, 10):
        lines[number]["method"] = "GET"
    state = job.run(lines, ordered=True, window=32)
    assert counts(state) == (200, 180, 20)
    for path in (job.target, job.errors):
        numbers = [int(line["id"].rpartition("_")[2]) for line in objects(path)]
        assert numbers == sorted(numbers)


def test_a_job_reports_its_progress_and_once_completed_runs_no_line_again(job: Job) -> None:
    told: list[Batch] = []
    first = job.run([completion(number) for number in range(20)], on_progress=told.append)
    assert (told[-1].status, told[-1].request_counts.done) == ("completed", 20)
    text = job.target.read_bytes()
    again = job.run()
    assert (again.id, again.status, again.counts) == (first.id, "completed", first.counts)
    assert job.target.read_bytes() == text


def test_a_job_fails_that_has_lost_an_answer(job: Job) -> None:
    # Given a file that loses its last line just before the job ends
    job.run([completion(number) for number in range(5)])

    def lose(batch: Batch) -> None:
        if batch.status == "finalizing":
            lines = job.target.read_bytes().splitlines(keepends=True)
            job.target.write_bytes(b"".join(lines[:-1]))

    # I expect the check at its end to notice.
    with pytest.raises(BatchBroken, match="5 input lines, but 4 results and 0 errors"):
        job.run(on_progress=lose)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_job_continues_after_a_torn_line(job: Job, suffix: str) -> None:
    # Given a job whose last bytes are missing
    job.target = job.target.with_name(f"out.jsonl{suffix}")
    first = job.run([completion(number) for number in range(50)])
    job.target.write_bytes(job.target.read_bytes()[:-20])
    # If it runs again, I expect every line once.
    again = job.run()
    assert (again.id, again.counts) == (first.id, first.counts)
    numbers = [int(line["id"].rpartition("_")[2]) for line in job.answered()]
    assert sorted(numbers) == list(range(1, 51))


def test_a_last_line_of_zero_bytes_is_cut_off(job: Job) -> None:
    # Given a file as after a power failure: blocks without their contents
    job.run([completion(number) for number in range(10)])
    lines = job.target.read_bytes().splitlines(keepends=True)
    job.target.write_bytes(b"".join(lines[:5]) + bytes(100) + b"\n")
    state = job.run()
    assert counts(state) == (10, 10, 0)


def test_a_foreign_output_file_is_not_overwritten(job: Job) -> None:
    job.target.write_text("precious\n")
    with pytest.raises(SettingsError, match="has lines already"):
        job.run([completion(1)])
    assert job.target.read_text() == "precious\n"
    # Overwriting needs an option.
    assert job.run(overwrite=True).status == "completed"


def test_a_foreign_line_in_the_output_is_an_error(job: Job) -> None:
    job.run([completion(number) for number in range(3)])
    text = job.target.read_text()
    job.target.write_text("precious\n" + text)
    with pytest.raises(UnreadableFile, match="line 1 was not written by this job"):
        job.run()


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"model": "other"}, "model"), ({"params": {"seed": 1}}, "params"), ({}, "input")],
)
def test_a_job_does_not_continue_with_other_settings(
    job: Job, options: dict[str, Any], fault: str
) -> None:
    job.run([completion(1)])
    with pytest.raises(SettingsError, match=fault):
        job.run(None if options else [completion(2)], **options)


def test_errors_run_again_on_request(job: Job) -> None:
    # Given a job with an error whose request id the yard knows
    first = job.run([completion(1), bad(2)])
    assert counts(first) == (2, 1, 1)
    again = job.run(retry_errors=True)
    # I expect only that line to be submitted again.
    assert (again.id, again.round, counts(again)) == (first.id, 2, (2, 1, 1))
    [error] = objects(job.errors)
    assert error["response"]["request_id"] == "#0"


def test_a_second_process_on_one_output_is_refused(job: Job) -> None:
    faults: list[Exception] = []

    def meddle(_: Batch) -> None:
        with pytest.raises(OutputInUse) as caught:
            job.run()
        faults.append(caught.value)

    job.run([completion(1)], on_progress=meddle)
    assert faults


def test_shared_parameters_are_checked_before_the_first_write(job: Job) -> None:
    with pytest.raises(InvalidRequest, match="temperatur"):
        job.run([completion(1)], params={"temperatur": 0})
    assert not job.target.exists()


def test_a_job_without_a_yard_fails_and_can_be_resumed(plant: Plant, job: Job) -> None:
    spec = job.spec([completion(1)])
    asking = by_client(plant.url, "nobody-home", connect_timeout_s=0.1)
    with pytest.raises(NoCoordinator):
        Runner(plant.url, "nobody-home", spec, asking=asking).run()
    state = load_state(spec.state_path)
    assert state is not None
    assert state.status == "failed"
    assert "no coordinator" in state.message
    assert job.run().status == "completed"


async def _collect(lines: Any, plant: Plant, **options: Any) -> list[dict[str, Any]]:
    stream = stream_batch(lines, redis_url=plant.url, yard=plant.keys.yard, **options)
    return [line async for line in stream]


def test_lines_without_files_are_streamed(plant: Plant, write_lines: WriteLines) -> None:
    lines = [{"id": number, "prompt": f"p {number}"} for number in range(30)]
    mixed: list[Any] = [*lines, "{broken", b'{"prompt": "bytes"}']
    found = asyncio.run(_collect(mixed, plant, ordered=True, window=8, params={"max_tokens": 2}))
    assert [line["custom_id"] for line in found[:30]] == [str(number) for number in range(30)]
    assert len(found[0]["response"]["body"]["choices"][0]["text"]) == 2
    assert found[30]["error"]["code"] == "invalid_json_line"
    assert found[31]["custom_id"] == "32"
    from_file = asyncio.run(_collect(write_lines("in.jsonl", lines), plant))
    assert len(from_file) == 30


def test_a_bar_shows_its_numbers_at_80_columns() -> None:
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True)
    counts = RequestCounts(total=200_000, completed=4909, failed=12)
    batch = Batch(
        id="batch_1",
        status="in_progress",
        request_counts=counts,
        lines_per_s=1234.5,
        eta_s=3700.0,
    )
    with _shown(console) as tell:
        tell(batch)
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", text.getvalue())
    assert "4921/200000 1234.5 lines/s, 1:01:40 left, 12 errors 0:00:0" in plain
