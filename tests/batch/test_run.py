"""Whole batch jobs on a simulated yard."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.batch.conftest import WriteLines, completion, objects, zstd
from tests.support.processes import Plant
from tests.support.servers import free_port
from tokenyard.batch import (
    BatchBroken,
    BatchState,
    OutputInUse,
    Progress,
    UnreadableFile,
    run_batch,
    stream_batch,
)
from tokenyard.batch.progress import LineCount
from tokenyard.batch.runner import Runner
from tokenyard.batch.state import Batch, BatchSpec, BatchUsage, RequestCounts, load_state
from tokenyard.cli.batch.run import _shown
from tokenyard.protocol.errors import InvalidRequest, NoCoordinator, SettingsError

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {
    "custom_id": "chat",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": HELLO, "max_tokens": 3},
}
Run = Callable[..., BatchState]


@pytest.fixture
def run(plant: Plant) -> Run:
    """A function that runs a job on the shared yard."""

    def run(source: Path, target: Path, **options: Any) -> BatchState:
        return run_batch(source, target, redis_url=plant.url, yard=plant.keys.yard, **options)

    return run


def counts(state: BatchState) -> tuple[int, int, int]:
    return state.counts.total, state.counts.completed, state.counts.failed


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("in.jsonl", "out.jsonl"),
        ("in.jsonl.gz", "out.jsonl.gz"),
        pytest.param("in.jsonl.zst", "out.jsonl.zst", marks=zstd),
    ],
)
def test_every_line_gets_its_answer(
    run: Run, write_lines: WriteLines, tmp_path: Path, source: str, target: str
) -> None:
    lines = [completion(number) for number in range(300)]
    state = run(write_lines(source, lines), tmp_path / target)
    assert state.status == "completed"
    assert counts(state) == (300, 300, 0)
    found = objects(tmp_path / target)
    assert sorted(line["custom_id"] for line in found) == sorted(
        line["custom_id"] for line in lines
    )
    assert all(line["error"] is None for line in found)
    assert objects(state.spec.errors_path) == []


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


def test_answers_have_the_form_of_the_batch_api(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    plain = {"id": "plain", "tokens": [1, 2, 3], "max_tokens": 2}
    source = write_lines("in.jsonl", [completion(1, n=2), CHAT, plain])
    state = run(source, tmp_path / "out.jsonl")
    found = {line["custom_id"]: line for line in objects(tmp_path / "out.jsonl")}
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


def test_bad_lines_are_errors_and_affect_no_other_line(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines(
        "in.jsonl",
        [
            completion(1),
            "{broken",
            completion(1),  # a repeated id
            completion(2, temperature=-1),
            completion(3, model="unknown"),
            completion(4, prompt=""),
            {**completion(5), "url": "/v1/embeddings"},
            completion(6, prompt="x" * 10_000, max_tokens=1),
        ],
    )
    state = run(source, tmp_path / "out.jsonl")
    assert state.status == "completed"
    assert counts(state) == (8, 1, 7)
    found = {line["error"]["line"]: line for line in objects(state.spec.errors_path)}
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


def test_ordered_answers_have_the_order_of_the_lines(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    # Given lines of very different lengths, some of them bad
    lines = [completion(number, max_tokens=1 + number * 37 % 200) for number in range(200)]
    for number in range(5, 200, 10):
        lines[number]["method"] = "GET"
    source = write_lines("in.jsonl", lines)
    state = run(source, tmp_path / "out.jsonl", ordered=True, window=32)
    assert counts(state) == (200, 180, 20)
    for path in (tmp_path / "out.jsonl", state.spec.errors_path):
        numbers = [int(line["id"].rpartition("_")[2]) for line in objects(path)]
        assert numbers == sorted(numbers)


def test_a_completed_job_runs_no_line_again(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(number) for number in range(20)])
    first = run(source, tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl").read_bytes()
    again = run(source, tmp_path / "out.jsonl")
    assert (again.id, again.status, again.counts) == (first.id, "completed", first.counts)
    assert (tmp_path / "out.jsonl").read_bytes() == text


def test_a_job_fails_that_has_lost_an_answer(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    # Given a file that loses its last line just before the job ends
    source, target = write_lines("in.jsonl", [completion(number) for number in range(5)]), "out"
    run(source, tmp_path / target)

    def lose(progress: Progress) -> None:
        if progress.status == "finalizing":
            lines = (tmp_path / target).read_bytes().splitlines(keepends=True)
            (tmp_path / target).write_bytes(b"".join(lines[:-1]))

    # I expect the check at its end to notice.
    with pytest.raises(BatchBroken, match="5 input lines, but 4 results and 0 errors"):
        run(source, tmp_path / target, on_progress=lose)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_job_continues_after_a_torn_line(
    run: Run, write_lines: WriteLines, tmp_path: Path, suffix: str
) -> None:
    # Given a job whose last bytes are missing
    source = write_lines("in.jsonl", [completion(number) for number in range(50)])
    target = tmp_path / f"out.jsonl{suffix}"
    first = run(source, target)
    target.write_bytes(target.read_bytes()[:-20])
    # If it runs again, I expect every line once.
    again = run(source, target)
    assert (again.id, again.counts) == (first.id, first.counts)
    numbers = [int(line["id"].rpartition("_")[2]) for line in objects(target)]
    assert sorted(numbers) == list(range(1, 51))


def test_a_last_line_of_zero_bytes_is_cut_off(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    # Given a file as after a power failure: blocks without their contents
    source = write_lines("in.jsonl", [completion(number) for number in range(10)])
    run(source, tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:5]) + bytes(100) + b"\n")
    state = run(source, tmp_path / "out.jsonl")
    assert counts(state) == (10, 10, 0)


def test_a_foreign_output_file_is_not_overwritten(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    (tmp_path / "out.jsonl").write_text("precious\n")
    with pytest.raises(SettingsError, match="has lines already"):
        run(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    # Overwriting needs an option.
    assert run(source, tmp_path / "out.jsonl", overwrite=True).status == "completed"


def test_a_foreign_line_in_the_output_is_an_error(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(number) for number in range(3)])
    run(source, tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text("precious\n" + text)
    with pytest.raises(UnreadableFile, match="line 1 was not written by this job"):
        run(source, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"model": "other"}, "model"), ({"params": {"seed": 1}}, "params"), ({}, "input")],
)
def test_a_job_does_not_continue_with_other_settings(
    run: Run, write_lines: WriteLines, tmp_path: Path, options: dict[str, Any], fault: str
) -> None:
    run(write_lines("in.jsonl", [completion(1)]), tmp_path / "out.jsonl")
    if not options:
        write_lines("in.jsonl", [completion(2)])
    with pytest.raises(SettingsError, match=fault):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)


def test_errors_run_again_on_request(
    run: Run, write_lines: WriteLines, tmp_path: Path, plant: Plant
) -> None:
    # Given a job with an error whose request id the yard knows
    source = write_lines("in.jsonl", [completion(1), completion(2, temperature=-1)])
    first = run(source, tmp_path / "out.jsonl")
    assert counts(first) == (2, 1, 1)
    again = run(source, tmp_path / "out.jsonl", retry_errors=True)
    # I expect only that line to be submitted again.
    assert (again.id, again.round, counts(again)) == (first.id, 2, (2, 1, 1))
    [error] = objects(first.spec.errors_path)
    assert error["response"]["request_id"] == "#0"


def test_a_second_process_on_one_output_is_refused(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    faults: list[Exception] = []

    def meddle(_: Progress) -> None:
        with pytest.raises(OutputInUse) as caught:
            run(source, tmp_path / "out.jsonl")
        faults.append(caught.value)

    run(source, tmp_path / "out.jsonl", on_progress=meddle)
    assert faults


def test_shared_parameters_are_checked_before_the_first_write(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="temperatur"):
        run(write_lines("in.jsonl", [completion(1)]), tmp_path / "out", params={"temperatur": 0})
    assert not (tmp_path / "out").exists()


def test_a_job_without_a_yard_fails_and_can_be_resumed(
    plant: Plant, write_lines: WriteLines, tmp_path: Path, run: Run
) -> None:
    source = write_lines("in.jsonl", [completion(1)])
    spec = BatchSpec(input=str(source), output=str(tmp_path / "out.jsonl"))
    with pytest.raises(NoCoordinator):
        Runner(plant.url, "nobody-home", spec, connect_timeout_s=0.1).run()
    state = load_state(spec.state_path)
    assert state is not None
    assert state.status == "failed"
    assert "no coordinator" in state.message
    assert run(source, tmp_path / "out.jsonl").status == "completed"


def test_progress_is_reported_until_the_end(
    run: Run, write_lines: WriteLines, tmp_path: Path
) -> None:
    told: list[Progress] = []
    source = write_lines("in.jsonl", [completion(number) for number in range(10)])
    run(source, tmp_path / "out.jsonl", on_progress=told.append)
    assert [each.status for each in told][-1] == "completed"
    assert told[-1].counts.done == 10


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
    batch = Batch(id="batch_1", status="in_progress", request_counts=counts)
    with _shown(console) as tell:
        tell(Progress(batch.id, "in_progress", counts, 1234.5, 3700.0, BatchUsage(), batch))
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", text.getvalue())
    assert "4921/200000 1234.5 lines/s, 1:01:40 left, 12 errors 0:00:0" in plain
