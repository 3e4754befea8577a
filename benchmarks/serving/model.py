"""The model of the long workload: a Llama of random weights, made for each run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from benchmarks.llama import write_tokenizer
from worker.models import ModelSpec

PROMPT_TOKENS: Final = 512
ANSWER_TOKENS: Final = 128
NAME: Final = "random-llama"
_WIDTH: Final = 128
_LAYERS: Final = 2
_HEAD: Final = 64
_SPECIAL: Final = ("<pad>", "<s>", "</s>", "<unk>")
_WORDS: Final = (*_SPECIAL, *(f"w{number}" for number in range(508)))


def write_model(folder: Path) -> ModelSpec:
    """Write the model's files; returns the spec with which all sides load it.

    It has no prefix cache, because prompts repeat in each round. It sets the other limits because
    vLLM chooses different ones for a program, a server and Tokenyard.
    """
    _write_weights(folder)
    write_tokenizer(_WORDS, "<unk>", folder)
    (folder / "config.json").write_text(json.dumps(_config()))
    return ModelSpec(
        name=NAME,
        path=str(folder),
        dtype="float32",
        max_model_len=PROMPT_TOKENS + ANSWER_TOKENS,
        max_num_seqs=256,
        enforce_eager=True,
        kv_cache_gib=0.5,  # 256 requests of 640 tokens at 2 KiB take 0.31
        engine_args={"enable_prefix_caching": False, "max_num_batched_tokens": 4096},
    )


def prompts(count: int) -> list[list[int]]:
    """Distinct prompts, the same in each run."""
    draw = random.Random(PROMPT_TOKENS)
    words = range(len(_SPECIAL), len(_WORDS))
    return [draw.choices(words, k=PROMPT_TOKENS) for _ in range(count)]


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _WIDTH // _HEAD,
        "num_key_value_heads": _WIDTH // _HEAD,
        "head_dim": _HEAD,
        "vocab_size": len(_WORDS),
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _write_weights(folder: Path) -> None:
    draw = np.random.default_rng(0)
    inner = 2 * _WIDTH

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        values = draw.standard_normal((rows, columns), np.float32)
        return values * np.float32(columns**-0.5)

    ones = np.ones(_WIDTH, np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(len(_WORDS), _WIDTH),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(len(_WORDS), _WIDTH),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = ones
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}.self_attn.{name}.weight"] = matrix(_WIDTH, _WIDTH)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}.mlp.{name}.weight"] = matrix(inner, _WIDTH)
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(_WIDTH, inner)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
