"""A reasoning model's budget of tokens, as vLLM's server takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.announcements import ModelProfile
from tests.engines.harness import MODELS
from tests.unit.gateway.conftest import adder_tokenizer
from tests.unit.gateway.test_door import CHAT, Queue, answer, front_end

SAID = {"model": "thinker", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2000}
THINKING = SAID | {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def thinker(folder: Path) -> Path:
    """The example model with marks of reasoning in its tokenizer."""
    adder_tokenizer()  # sets vLLM's environment first
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "adder")
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    config = json.loads((MODELS / "adder" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder


@pytest.mark.parametrize(
    ("arguments", "budgets"),
    [
        ({"reasoning_parser": "qwen3"}, [3, 1024]),
        (
            {
                "reasoning_config": {
                    "reasoning_start_str": "<think>",
                    "reasoning_end_str": "</think>",
                }
            },
            [3, 1024],
        ),
        ({}, []),
    ],
)
async def test_a_budget_goes_to_the_queue(
    tmp_path: Path, arguments: dict[str, Any], budgets: list[int]
) -> None:
    queue = Queue()
    app = await front_end(queue, ModelProfile("thinker", str(thinker(tmp_path)), arguments))
    answers = [
        await answer(app, CHAT, SAID | {"thinking_token_budget": 3}),
        await answer(app, "/v1/messages", THINKING),
    ]
    assert [one.params.thinking_token_budget for one in queue.asked] == budgets, answers
    if not budgets:
        assert all("reasoning_config is not configured" in text for _, text in answers)
