"""`vllm.LLM` on the rows of `benchmarks.pooling`.

Arguments: the task, the model's folder, the rows, the most at once, the file of the report.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.media_models import picture, shown
from worker.engines.cpu_features import request_amx


def main() -> None:
    """Report seconds, and the numbers of some rows by index."""
    task, model, count, at_once, report = sys.argv[1:]
    request_amx()
    from vllm import LLM, SamplingParams

    from benchmarks.pooling import CAPTION, DOCUMENTS, rows

    params = SamplingParams(**CAPTION)

    llm: Any = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=int(at_once),
        kv_cache_memory_bytes=2**28,
        disable_log_stats=True,
    )
    texts: list[Any] = rows(int(count))
    if task == "caption":
        texts = [*map(picture, range(int(count)))]

    def run(part: list[Any]) -> list[Any]:
        if task == "caption":
            outputs = llm.chat([_chat(one) for one in part], params, use_tqdm=False)
            return [one.outputs[0].text for one in outputs]
        if task == "embed":
            outputs = llm.encode(part, pooling_task="embed", use_tqdm=False)
            return [one.outputs.data for one in outputs]
        found = []
        for at in range(0, len(part), DOCUMENTS):
            found += llm.score(part[0], part[at : at + DOCUMENTS], use_tqdm=False)
        return [one.outputs.score for one in found]

    run(texts[:20] if task == "caption" else texts[:500])
    began = time.perf_counter()
    numbers = run(texts)
    seconds = time.perf_counter() - began
    step = max(1, len(numbers) // 50)
    some = {at: numbers[at] for at in range(0, len(numbers), step)}
    told = {at: one if isinstance(one, float | str) else one.tolist() for at, one in some.items()}
    Path(report).write_text(json.dumps({"seconds": seconds, "some": told}))


def _chat(content: bytes) -> list[dict[str, Any]]:
    from benchmarks.pooling import QUESTION

    return [{"role": "user", "content": [shown(content), {"type": "text", "text": QUESTION}]}]


if __name__ == "__main__":
    main()
