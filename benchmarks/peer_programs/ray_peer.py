"""Ray Data's processor for vLLM: embeds the column "text" of a table.

Arguments: the model's folder, the table, the folder for the answers, the most requests at once.
"""

from __future__ import annotations

import sys

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig


def main() -> None:
    """Embed all rows."""
    model, source, target, at_once = sys.argv[1:]
    ray.init(num_cpus=8, include_dashboard=False)  # its stages each reserve one
    config = vLLMEngineProcessorConfig(
        model_source=model,
        task_type="embed",
        engine_kwargs={
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": int(at_once),
            "kv_cache_memory_bytes": 2**28,
        },
        batch_size=256,
        concurrency=1,
        chat_template_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,
        placement_group_config={"bundle_per_worker": {"CPU": 1}},
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["text"], "text": row["text"]},
        postprocess=lambda row: {"text": row["text"], "embedding": row["embeddings"]},
    )
    processor(ray.data.read_parquet(source)).write_parquet(target)


if __name__ == "__main__":
    main()
