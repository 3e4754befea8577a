"""Small models of any size, with random weights or with weights that make them count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

VOCABULARY = 512
HEAD = 64
Family = Literal["llama", "qwen2", "qwen3"]
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
#: What the layers of a counting model add to its input: far too little to change a token.
_NOISE = 0.05


def write_llama(
    folder: Path,
    *,
    width: int = 512,
    layers: int = 4,
    seed: int = 0,
    family: Family = "llama",
    counts: bool = False,
    positions: int = 256,
    dtype: str = "float32",
) -> Path:
    """Write a model without a tokenizer into a new folder, and return the folder.

    After each token, a model that ``counts`` generates the token with the next number
    (`counted`), in any dtype and batch: its layers compute, but add almost nothing.
    """
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = _random_tensors(random, width, layers, family)
    if counts:
        _make_it_count(tensors, random)
    folder.mkdir()
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = _config(width, layers, family) | {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def counted(prompt: Sequence[int], count: int) -> list[int]:
    """What a counting model generates after a prompt."""
    return [(prompt[-1] + 1 + at) % VOCABULARY for at in range(count)]


def _random_tensors(
    random: torch.Generator, width: int, layers: int, family: Family
) -> dict[str, torch.Tensor]:
    import torch

    inner = 2 * width

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
        if family == "qwen2":
            for name in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{at}.self_attn.{name}.bias"] = torch.randn(width, generator=random)
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{at}.self_attn.{name}.weight"] = torch.ones(HEAD)
    return tensors


def _make_it_count(tensors: dict[str, torch.Tensor], random: torch.Generator) -> None:
    """Give each token the output row that is its predecessor's input row."""
    import torch

    shape = tensors["model.embed_tokens.weight"].shape
    signs = torch.randint(0, 2, shape, generator=random) * 2.0 - 1.0
    tensors["model.embed_tokens.weight"] = signs
    tensors["lm_head.weight"] = signs.roll(1, 0) / shape[1]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(_NOISE)


def _config(width: int, layers: int, family: Family) -> dict[str, Any]:
    heads = width // HEAD
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
