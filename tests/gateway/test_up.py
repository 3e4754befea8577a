"""`tokenyard up`, and OpenAI's SDK at once: files and batches without another command."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.processes import is_gone
from tests.support.up import running_up
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(500)]

ENDS_S = 180.0


def test_up_serves_files_and_batches(tmp_path: Path) -> None:
    # Given a yard as `up` starts it
    options = ("--slots", "1", "--gateway", "--http-port", "0")
    with running_up(tmp_path, *options) as up:
        assert up.pids.keys() == {"broker", "coordinator", "worker", "gateway", "batch"}
        with OpenAI(base_url=up.http_url, api_key="none", timeout=90.0) as client:
            # If a batch is asked for by the SDK
            body = {"model": "adder", "prompt": "12+34=", "max_tokens": 8, "temperature": 0}
            line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
            file = client.files.create(file=("in", json.dumps(line).encode()), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )

            def is_over() -> bool:
                return client.batches.retrieve(batch.id).status == "completed"

            # I expect its answer, in the data folder of the yard,
            eventually(is_over, timeout_s=ENDS_S, every_s=0.5)
            output = client.batches.retrieve(batch.id).output_file_id
            assert output is not None
            answer = json.loads(client.files.content(output).text)
        assert answer["response"]["body"]["choices"][0]["text"] == "46"
        assert (tmp_path / "yard" / "files" / "tenant-" / output).is_file()
    # and nothing to be left once `up` has ended.
    assert all(is_gone(pid) for pid in up.pids.values())
    port = int(str(up.http_url).rpartition(":")[2].partition("/")[0])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
