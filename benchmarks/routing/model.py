"""A small Llama with predictable answers: each token has a fixed successor.

It computes attention and keeps a KV cache like any other Llama, but adds nothing of it: the next
token depends on the last one alone, by a margin beyond any rounding.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

VOCABULARY: Final = 512
LONGEST: Final = 4096  # tokens, prompt plus output
_WIDTH: Final = 512
_INNER: Final = 1024
_LAYERS: Final = 4


def successors() -> list[int]:
    """The successor of each token."""
    tokens = list(range(VOCABULARY))
    random.Random(7).shuffle(tokens)
    return tokens


def answer(prompt: list[int], count: int) -> list[int]:
    """The model's greedy answer of ``count`` tokens."""
    following, said = successors(), [prompt[-1]]
    for _ in range(count):
        said.append(following[said[-1]])
    return said[1:]


def write_model(folder: Path) -> None:
    """Write the model's files, without a tokenizer, to an existing folder."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(0)
    head = torch.zeros(VOCABULARY, _WIDTH)
    head[successors()] = torch.eye(VOCABULARY, _WIDTH)
    tensors = {
        "model.embed_tokens.weight": torch.eye(VOCABULARY, _WIDTH),
        "model.norm.weight": torch.ones(_WIDTH),
        "lm_head.weight": head,
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(_WIDTH)
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{at}.self_attn.{name}.weight"] = torch.randn(_WIDTH, _WIDTH, generator=draw)
        tensors[f"{at}.self_attn.o_proj.weight"] = torch.zeros(_WIDTH, _WIDTH)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}.mlp.{name}.weight"] = torch.randn(_INNER, _WIDTH, generator=draw)
        tensors[f"{at}.mlp.down_proj.weight"] = torch.zeros(_WIDTH, _INNER)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _WIDTH // 64,
        "num_key_value_heads": _WIDTH // 64,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
