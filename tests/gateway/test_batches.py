"""OpenAI's SDK: files and batches, run by a `tokenyard batch worker` that may be killed."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import obstore
import obstore.store
import openai
import psutil
import pytest
from openai import OpenAI
from openai.types import Batch

from benchmarks.media_models import picture, shown
from tests.batch.running import command, words
from tests.cli.running import environment
from tests.engines.test_media import TEXT, said
from tests.gateway.asked import NAMED, TOOL, say
from tests.gateway.forked import ForkedBatchWorker
from tests.gateway.stand import NAMES, Door, Stand
from tests.gateway.test_sound import GREEDY, LONG, TRANSCRIPTIONS, ask
from tests.support.processes import Program, is_gone
from tests.support.s3 import needs_s3, running_s3
from tests.support.waiting import eventually
from tokenyard.batch.rq.jobs import FOLDER_PREFIX

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ENDS_S = 120.0
#: The tool as the Responses API has it.
FLAT_TOOL = {"type": "function", **TOOL["function"]}
FLAT_NAMED = {"type": "function", "name": "get_weather"}
CHATS = "/v1/chat/completions"
Start = Callable[[], Program]


on_both = pytest.mark.parametrize(
    "sdk", ["folder", pytest.param("s3", marks=needs_s3)], indirect=True
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a folder in a bucket, which all programs of these tests find."""
    with (
        running_s3(tmp_path_factory.mktemp("s3") / "server.log") as variables,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        yield "s3://yard/files"


@pytest.fixture(scope="module")
def bucket_door(stand: Stand, bucket: str) -> Door:
    """A gateway whose files are in the bucket."""
    return Door(stand.plant, set(NAMES), files_url=bucket)


@pytest.fixture
def sdk(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    """A client of a gateway with a folder, or with a bucket."""
    is_s3 = getattr(request, "param", "folder") == "s3"
    door: Door = request.getfixturevalue("bucket_door" if is_s3 else "door")
    door.wait()
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", timeout=90.0, max_retries=0) as client:
        yield client


@pytest.fixture
def start_worker(stand: Stand, tmp_path: Path) -> Iterator[Start]:
    """Starts a process of `tokenyard batch worker`, which ends with the test."""
    started: list[Program] = []

    def start_one() -> Program:
        # Forked from a process that has vLLM, which it would import itself.
        started.append(ForkedBatchWorker(words(stand.plant, "worker"), tmp_path / "worker.log"))
        return started[-1]

    yield start_one
    # With all of its family: until they are gone, the broker may give the next job to this worker.
    for process in started:
        process.end()
    if started:
        sys.stderr.write(started[-1].log[-4000:])


def sums(count: int) -> dict[str, tuple[str, str]]:
    """Sums by the ids of their lines, with their answers."""
    pairs = [(10 + at % 90, 10 + at // 90) for at in range(count)]
    return {f"sum-{at}": (f"{a}+{b}=", str(a + b)) for at, (a, b) in enumerate(pairs)}


def line(name: str, prompt: str, **body: Any) -> dict[str, Any]:
    body = {"model": "adder", "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def upload(sdk: OpenAI, lines: list[dict[str, Any]]) -> str:
    """Upload a batch file; its id."""
    text = "".join(json.dumps(one) + "\n" for one in lines)
    return sdk.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def order(sdk: OpenAI, file_id: str, endpoint: Any = "/v1/completions", **options: Any) -> Batch:
    return sdk.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window="24h", **options
    )


#: What differs in each request; the second finds the first's prompt in the cache.
OWN = (
    *("id", "call_id", "created", "created_at", "request_id", "completed_at"),
    *("cached_tokens", "created_cache_tokens"),
)


def without_own(body: Any) -> Any:
    """A body without what differs in each request."""
    if isinstance(body, dict):
        return {name: without_own(value) for name, value in body.items() if name not in OWN}
    return [without_own(one) for one in body] if isinstance(body, list) else body


def has_parts(bucket: str) -> bool:
    """Whether results of a job that is not over are in a bucket."""
    store = obstore.store.from_url(bucket)
    return any(".parts/" in one["path"] for page in obstore.list(store) for one in page)


def ended(sdk: OpenAI, batch_id: str) -> Batch:
    """The batch, once it is over."""

    def look() -> Batch | None:
        found = sdk.batches.retrieve(batch_id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(look, timeout_s=ENDS_S, every_s=0.2)


def lines_of(sdk: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in sdk.files.content(file_id).text.splitlines()]


@on_both
def test_pictures_in_uploaded_files_are_seen(sdk: OpenAI, start_worker: Start) -> None:
    # Given a picture in a file, in the forms of a part, and a file that is not there
    file = sdk.files.create(file=("one.png", picture(1)), purpose="vision").id
    parts: dict[str, dict[str, Any]] = {
        "url": {"type": "image_url", "image_url": {"url": file}},
        "id": {"type": "input_image", "file_id": file, "detail": "auto"},
        "data": shown(picture(1)),
        "gone": {"type": "image_url", "image_url": {"url": f"file-{0:032}"}},
    }
    asked = {"model": "pictures", "max_tokens": 12, "temperature": 0}
    lines = [
        {**line(name, ""), "url": CHATS, "body": {"messages": said(part, TEXT), **asked}}
        for name, part in parts.items()
    ]
    start_worker()
    done = ended(sdk, order(sdk, upload(sdk, lines), CHATS).id)
    # I expect one answer to all forms, and an error for the last.
    found = lines_of(sdk, done.output_file_id)
    texts = {one["response"]["body"]["choices"][0]["message"]["content"] for one in found}
    assert ({one["custom_id"] for one in found}, len(texts)) == ({"url", "id", "data"}, 1)
    (failed,) = lines_of(sdk, done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("gone", 404)


@on_both
def test_a_batch_of_completions_runs_to_its_files(sdk: OpenAI, start_worker: Start) -> None:
    asked = sums(50)
    lines = [line(name, prompt) for name, (prompt, _) in asked.items()]
    lines.append(line("refused", "1+1=", temperature=-1))
    lines.append({**line("elsewhere", "1+1="), "url": CHATS})
    lines.append({"id": "plain", "prompt": "1+1=", "tenant": "another"})
    file_id = upload(sdk, lines)
    # Given a batch that no worker has taken
    batch = order(sdk, file_id, metadata={"night": "1"})
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("validating", None, None)
    assert (batch.endpoint, batch.completion_window) == ("/v1/completions", "24h")
    assert batch.expires_at == batch.created_at + 24 * 3600
    # its input cannot be deleted.
    with pytest.raises(openai.ConflictError):
        sdk.files.delete(file_id)
    # If a worker runs it
    start_worker()
    done = ended(sdk, batch.id)
    # I expect each line to be in one of both files.
    assert done.status == "completed"
    assert done.metadata == {"night": "1"}
    assert done.completed_at is not None
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 53, "completed": 50, "failed": 3}
    results = lines_of(sdk, done.output_file_id)
    answers = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in results}
    assert answers == {name: answer for name, (_, answer) in asked.items()}
    assert {one["response"]["status_code"] for one in results} == {200}
    errors = {one["custom_id"]: one["error"]["code"] for one in lines_of(sdk, done.error_file_id)}
    assert errors.keys() == {"refused", "elsewhere", "plain"}
    output = sdk.files.retrieve(str(done.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert {one.id for one in sdk.files.list(purpose="batch_output")} >= {output.id}
    assert batch.id in {one.id for one in sdk.batches.list(limit=1)}


def test_a_batch_of_chats_is_seen_by_another_gateway(
    sdk: OpenAI, other_door: Door, start_worker: Start
) -> None:
    body = {
        "model": "speaker",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    chat = {"custom_id": "c", "method": "POST", "url": CHATS, "body": body}
    batch = order(sdk, upload(sdk, [chat]), CHATS)
    start_worker()
    with OpenAI(base_url=f"{other_door.url}/v1", api_key="none") as other:
        done = ended(other, batch.id)
        assert done.error_file_id is None
        [answer] = lines_of(other, done.output_file_id)
    assert answer["response"]["body"]["object"] == "chat.completion"
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_a_batch_of_embeddings(sdk: OpenAI, start_worker: Start) -> None:
    texts = {f"row {number}": f"text {number}" for number in range(20)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "bert", "input": text},
        }
        for name, text in texts.items()
    ]
    batch = order(sdk, upload(sdk, lines), "/v1/embeddings")
    start_worker()
    done = ended(sdk, batch.id)
    assert (done.status, done.error_file_id) == ("completed", None)
    found = {
        one["custom_id"]: one["response"]["body"]["data"][0]["embedding"]
        for one in lines_of(sdk, done.output_file_id)
    }
    expected = sdk.embeddings.create(model="bert", input=[*texts.values()])
    for name, one in zip(texts, expected.data, strict=True):
        assert found[name] == pytest.approx(one.embedding, abs=1e-6)


def test_a_batch_of_sound(sdk: OpenAI, http: httpx.Client, start_worker: Start) -> None:
    url = f"data:audio/wav;base64,{base64.b64encode(LONG).decode()}"
    given = {
        "three pieces": url,
        "text": url,
        "elsewhere": "http://127.0.0.1/a.wav",
        "no base64": "data:;base64,_",
    }
    common = {**GREEDY, "language": "en", "timestamp_granularities[]": ["segment"]}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": TRANSCRIPTIONS,
            "body": {**common, "model": "adder" if name == "text" else "sound", "file_url": one},
        }
        for name, one in given.items()
    ]
    batch = order(sdk, upload(sdk, lines), TRANSCRIPTIONS)
    start_worker()
    done = ended(sdk, batch.id)
    found = {one["custom_id"]: one for one in lines_of(sdk, done.output_file_id)}
    failed = {one["custom_id"]: one for one in lines_of(sdk, done.error_file_id)}
    expected = ask(http, TRANSCRIPTIONS, LONG, {"language": "en"}).json()
    assert found["three pieces"]["response"]["body"] == expected
    assert {name: one["error"]["message"].split(":")[0] for name, one in failed.items()} == {
        "elsewhere": "file_url",
        "text": "the model 'adder' does generate; /v1/audio/transcriptions needs transcription",
        "no base64": "file_url",
    }


@pytest.mark.long
def test_each_line_is_answered_as_its_endpoint_answers(
    sdk: OpenAI, http: httpx.Client, start_worker: Start
) -> None:
    # Given batches with tool calls, and of the Responses API
    bodies = {
        CHATS: {
            "auto": {"messages": say("hi"), "tools": [TOOL], "tool_choice": "auto"},
            "named": {"messages": say("hi"), "tools": [TOOL], "tool_choice": NAMED},
            "logprobs": {"messages": say("hi"), "logprobs": True, "top_logprobs": 2},
        },
        "/v1/responses": {
            "text": {"input": "hello", "instructions": "be short"},
            "tool": {"input": "hi", "tools": [FLAT_TOOL], "tool_choice": FLAT_NAMED},
        },
        "/v1/completions": {"list": {"prompt": ["a", "b"], "echo": True, "logprobs": 1}},
    }
    start_worker()
    for url, named in bodies.items():
        common = {"model": "speaker", "temperature": 0}
        common["max_output_tokens" if url == "/v1/responses" else "max_tokens"] = 60
        lines = [
            {"custom_id": name, "method": "POST", "url": url, "body": common | body}
            for name, body in named.items()
        ]
        # If a worker runs one
        done = ended(sdk, order(sdk, upload(sdk, lines), url).id)
        assert done.error_file_id is None, lines_of(sdk, done.error_file_id)
        # I expect in each line what the gateway answers, but for ids and times.
        for one in lines_of(sdk, done.output_file_id):
            answered = http.post(url, json=common | named[one["custom_id"]])
            assert one["response"]["status_code"] == answered.status_code == 200
            assert without_own(one["response"]["body"]) == without_own(answered.json())


def test_a_line_that_its_endpoint_refuses_is_an_error(sdk: OpenAI, start_worker: Start) -> None:
    refused = {
        "no such model": {"model": "nobody"},
        "stream": {"stream": True},
        "previous": {"previous_response_id": "resp_" + "0" * 32},
        "too long": {"max_output_tokens": 10**6},
        "no input": {"input": None},
    }
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": "speaker", "input": "hi", "max_output_tokens": 4, **body},
        }
        for name, body in refused.items()
    ]
    batch = order(sdk, upload(sdk, [*lines, lines[0]]), "/v1/responses")
    start_worker()
    done = ended(sdk, batch.id)
    assert (done.status, done.output_file_id) == ("completed", None)
    errors = lines_of(sdk, done.error_file_id)
    statuses = Counter(one["response"] and one["response"]["status_code"] for one in errors)
    assert statuses == {404: 1, 400: 4, None: 1}, errors
    codes = {one["custom_id"]: one["error"]["code"] for one in errors if one["response"]}
    assert codes["no such model"] == "model_not_found"


@on_both
def test_the_batch_of_a_killed_worker_has_each_line_once(
    request: pytest.FixtureRequest,
    sdk: OpenAI,
    start_worker: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_in_bucket = request.node.callspec.params["sdk"] == "s3"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = sums(4_000 if is_in_bucket else 2_000)
    lines = [line(name, prompt) for name, (prompt, _) in asked.items()]
    batch = order(sdk, upload(sdk, lines))

    def done_lines() -> int:
        counts = sdk.batches.retrieve(batch.id).request_counts
        return counts.completed if counts else 0

    worker = start_worker()
    before = eventually(done_lines, timeout_s=ENDS_S)
    if is_in_bucket:  # where a part of them has come
        eventually(lambda: has_parts(request.getfixturevalue("bucket")), timeout_s=ENDS_S)
    # If the worker and the process of its job are killed in the middle
    family = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    eventually(lambda: all(is_gone(one.pid) for one in family))
    assert 0 < before < len(asked)
    assert sdk.batches.retrieve(batch.id).status == "in_progress"
    assert len(list(tmp_path.glob(f"{FOLDER_PREFIX}*"))) == is_in_bucket
    start_worker()
    done = ended(sdk, batch.id)
    assert not list(tmp_path.glob(f"{FOLDER_PREFIX}*"))
    # I expect each line to be answered once.
    assert done.status == "completed"
    results = lines_of(sdk, done.output_file_id)
    assert Counter(one["custom_id"] for one in results) == Counter(asked.keys())
    assert {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in results} == {
        name: answer for name, (_, answer) in asked.items()
    }


@pytest.mark.long
@on_both
def test_a_batch_that_is_given_up_has_the_lines_that_were_answered(
    request: pytest.FixtureRequest, stand: Stand, sdk: OpenAI, start_worker: Start
) -> None:
    is_in_bucket = request.node.callspec.params["sdk"] == "s3"
    asked = sums(4_000 if is_in_bucket else 2_000)
    batch = order(sdk, upload(sdk, [line(name, prompt) for name, (prompt, _) in asked.items()]))
    # Given a batch whose worker is killed in the middle
    worker = start_worker()

    def has_answers() -> bool:
        counts = sdk.batches.retrieve(batch.id).request_counts
        is_kept = not is_in_bucket or has_parts(request.getfixturevalue("bucket"))
        return counts is not None and counts.completed > 0 and is_kept

    eventually(has_answers, timeout_s=ENDS_S)
    worker.kill()
    # If there is no further try
    stand.plant.connection.hset(f"rq:job:{batch.id}", "retries_left", 0)
    start_worker()
    done = ended(sdk, batch.id)
    # I expect what was answered, each line once.
    assert done.status == "failed"
    results = {
        one["custom_id"]: one["response"]["body"]["choices"][0]["text"]
        for one in lines_of(sdk, done.output_file_id)
    }
    assert 0 < len(results) < len(asked)
    assert results == {name: asked[name][1] for name in results}
    # and the rest, once an operator wants it.
    run = command(stand.plant, "resume", batch.id)
    assert subprocess.run(run, env=environment(), timeout=ENDS_S, check=False).returncode == 0
    again = ended(sdk, batch.id)
    assert again.status == "completed"
    names = Counter(one["custom_id"] for one in lines_of(sdk, again.output_file_id))
    assert names == Counter(asked.keys())


def test_a_batch_is_cancelled_in_the_middle(sdk: OpenAI, start_worker: Start) -> None:
    lines = [line(name, prompt) for name, (prompt, _) in sums(3_000).items()]
    batch = order(sdk, upload(sdk, lines))
    start_worker()
    eventually(lambda: sdk.batches.retrieve(batch.id).status == "in_progress", timeout_s=ENDS_S)

    assert sdk.batches.cancel(batch.id).status in ("cancelling", "cancelled")

    done = ended(sdk, batch.id)
    assert done.status == "cancelled"
    assert done.request_counts is not None
    codes = {one["error"]["code"] for one in lines_of(sdk, done.error_file_id)}
    assert codes == {"batch_cancelled"}
    assert done.request_counts.completed + done.request_counts.failed == 3_000


def test_a_batch_that_waits_is_cancelled_at_once(sdk: OpenAI) -> None:
    batch = order(sdk, upload(sdk, [line("a", "1+1=")]))

    assert sdk.batches.cancel(batch.id).status == "cancelled"


def test_the_same_idempotency_key_is_the_same_batch(sdk: OpenAI) -> None:
    file_id = upload(sdk, [line("a", "1+1=")])
    key = {"Idempotency-Key": f"nightly {file_id}"}
    batch = order(sdk, file_id, extra_headers=key)

    assert order(sdk, file_id, extra_headers=key).id == batch.id
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        order(sdk, file_id, extra_headers=key, metadata={"other": "body"})
    assert refused.value.code == "idempotency_key_reused"
    sdk.batches.cancel(batch.id)


def test_what_does_not_exist_is_not_found(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve("file-" + "0" * 32)
    with pytest.raises(openai.NotFoundError):
        sdk.batches.retrieve("batch_" + "0" * 32)
    with pytest.raises(openai.BadRequestError, match="/v1/responses"):
        order(sdk, "file-" + "0" * 32, "/v1/moderations")
