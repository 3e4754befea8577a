"""vLLM's own client, which asks two servers for embeddings or for ranks, one after the other.

Arguments: the task, the model's folder, texts, rounds, the URLs of the servers, the file of the
report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from benchmarks.gateway.client import bench
from benchmarks.pooling import AT_ONCE, DOCUMENTS

#: Tokens of a text, without those that the tokenizer adds.
_LENGTH: Final = 8
_ASKED: Final = {
    "http": [
        *("--backend", "openai-embeddings", "--endpoint", "/v1/embeddings"),
        *("--dataset-name", "random"),
    ],
    "rerank": [
        *("--backend", "vllm-rerank", "--endpoint", "/rerank"),
        *("--dataset-name", "random-rerank", "--random-batch-size", str(DOCUMENTS)),
    ],
}


def main() -> None:
    """Report for each round the requests per second of each server."""
    task, model, count, rounds, *urls, report = sys.argv[1:]
    options = ["--model", Path(model).name, "--tokenizer", model, "--disable-tqdm"]
    options += [*_ASKED[task], "--random-input-len", str(_LENGTH), "--num-prompts", count]
    options += ["--max-concurrency", str(AT_ONCE)]
    asked = -(-int(count) // DOCUMENTS) if task == "rerank" else int(count)

    def requests_per_s(url: str) -> float:
        said = bench([*options, "--base-url", url])
        if said["completed"] != asked:
            raise ValueError(f"{said['completed']} of {asked} requests were answered")
        return float(said["completed"] / said["duration"])

    for url in urls:
        requests_per_s(url)  # warms up
    found = [[requests_per_s(url) for url in urls] for _ in range(int(rounds))]
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
