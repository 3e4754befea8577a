"""Llamas of random weights, as large as a test needs them."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512


def write_llama(folder: Path, *, width: int = 512, layers: int = 4, seed: int = 0) -> Path:
    """A model without a tokenizer; returns its folder, which is made."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    inner, heads = 2 * width, width // 64

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, width),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": matrix(VOCABULARY, width),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(width)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}.self_attn.{name}.weight"] = matrix(width, width)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}.mlp.{name}.weight"] = matrix(inner, width)
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(width, inner)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
