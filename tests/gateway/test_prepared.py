"""A batch worker imports vLLM once, for all batches of gateways."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from openai import OpenAI

from tests.batch.running import start
from tests.gateway.stand import Stand
from tests.gateway.test_batches import ended, line, order, sdk, upload

__all__ = ["sdk"]

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]


def test_the_second_batch_of_a_worker_imports_no_vllm(
    stand: Stand, sdk: OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "worker.log"
    # Given a worker, of which each process logs what it imports
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    worker = start(stand.plant, log, "worker")
    try:
        # If it runs two batches
        for prompt in ("12+34=", "87+65="):
            done = ended(sdk, order(sdk, upload(sdk, [line("a", prompt)])).id)
            assert (done.status, done.error_file_id) == ("completed", None)
    finally:
        worker.terminate()
        worker.wait()
    # I expect one process to have imported vLLM, for both.
    imported = re.findall(r"\| +(vllm|torch|gateway\.batches\.lines)\n", log.read_text())
    assert sorted(imported) == ["gateway.batches.lines", "torch", "vllm"]
