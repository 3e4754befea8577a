"""What `vllm.LLM` answers, in a process of its own.

`python -m tests.support.llm MODEL ASKED`; the second is a file of JSON:

    {"engine_args": {...}, "pool": [tasks], "texts": [...], "query": "...", "chats": [...],
     "sound": "a file", "prompt": [tokens]}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.processes import ROOT

_ENDS_S: Final = 170.0
#: Twelve greedy tokens, even if the model would end sooner.
GREEDY: Final = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def answers_of_llm(model: Path, folder: Path, **asked: Any) -> dict[str, Any]:
    """Its answers: lists by task; for chats and sound prompt tokens, tokens and text of each."""
    file = folder / "asked.json"
    file.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.support.llm", str(model), str(file)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_ENDS_S
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    answers: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answers


def _answers(model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 26,
        **asked.get("engine_args", {}),
    )
    found: dict[str, Any] = {}
    for task in asked.get("pool", ()):
        if task == "score":
            outputs: Any = llm.score(asked["query"], asked["texts"], use_tqdm=False)
            found[task] = [one.outputs.score for one in outputs]
        else:
            outputs = llm.encode(asked["texts"], pooling_task=task, use_tqdm=False)
            found[task] = [one.outputs.data.tolist() for one in outputs]
    greedy = SamplingParams(**GREEDY)
    if "chats" in asked:
        found["chats"] = _texts(llm.chat(asked["chats"], greedy, use_tqdm=False))
    if "sound" in asked:
        heard: Any = {
            "prompt_token_ids": asked["prompt"],
            "multi_modal_data": {"audio": _samples(asked["sound"])},
        }
        found["sound"] = _texts(llm.generate([heard], greedy, use_tqdm=False))
    return found


def _texts(outputs: Any) -> list[Any]:
    return [
        [len(one.prompt_token_ids), list(one.outputs[0].token_ids), one.outputs[0].text]
        for one in outputs
    ]


def _samples(file: str) -> Any:
    import soundfile

    return soundfile.read(file, dtype="float32")


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from worker.engines.cpu_features import request_amx

    request_amx()
    answers = _answers(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
    sys.stdout.write(f"\n{json.dumps(answers)}\n")
