"""Writes the weights of `benchmarks.llama`, generated on the GPU if there is one.

Arguments: the shape as JSON, the folder, and the file for the JSON report (seconds). It is a
separate program so that the benchmark holds neither a CUDA context nor torch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.llama import Shape

#: Size of what attention and MLP add to an embedding of size 1.
_ADDED: Final = 0.1
#: Size of the logit of a wrong token.
_LOGIT: Final = 1.0


def main() -> None:
    """Write one file per layer, so that memory holds only one layer at a time."""
    told, folder, report = sys.argv[1:]
    began = time.monotonic()
    write_weights(Shape(**json.loads(told)), Path(folder))
    Path(report).write_text(json.dumps(time.monotonic() - began))


def write_weights(shape: Shape, folder: Path) -> None:
    """Write all files and their index."""
    draw = _Draw("cuda" if torch.cuda.is_available() else "cpu")
    files: dict[str, str] = {}
    for part in range(shape.layers + 1):
        tensors = _layer(shape, part - 1, draw) if part else _outer(shape, draw)
        name = f"model-{part:05}-of-{shape.layers:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class _Draw:
    """Random matrices in bf16."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def matrix(self, rows: int, columns: int, scale: float) -> Any:
        """Normally distributed numbers, moved to the CPU."""
        options: dict[str, Any] = {"device": self._device, "dtype": torch.bfloat16}
        drawn = torch.randn(rows, columns, generator=self._generator, **options)
        return (drawn * scale).cpu()


def _outer(shape: Shape, draw: _Draw) -> dict[str, Any]:
    words = draw.matrix(shape.vocabulary, shape.hidden, 1.0)
    following = words.roll(1, 0)  # row n + 1 is token n
    return {
        "model.embed_tokens.weight": words,
        "model.norm.weight": _ones(shape),
        "lm_head.weight": (following * _LOGIT * shape.hidden**-0.5).contiguous(),
    }


def _layer(shape: Shape, layer: int, draw: _Draw) -> dict[str, Any]:
    hidden, inner = shape.hidden, shape.inner
    keys = hidden * shape.kv_heads // shape.heads
    wide, deep = hidden**-0.5, inner**-0.5
    at = f"model.layers.{layer}"
    return {
        f"{at}.input_layernorm.weight": _ones(shape),
        f"{at}.post_attention_layernorm.weight": _ones(shape),
        f"{at}.self_attn.q_proj.weight": draw.matrix(hidden, hidden, wide),
        f"{at}.self_attn.k_proj.weight": draw.matrix(keys, hidden, wide),
        f"{at}.self_attn.v_proj.weight": draw.matrix(keys, hidden, wide),
        f"{at}.self_attn.o_proj.weight": draw.matrix(hidden, hidden, _ADDED * wide),
        f"{at}.mlp.gate_proj.weight": draw.matrix(inner, hidden, wide),
        f"{at}.mlp.up_proj.weight": draw.matrix(inner, hidden, wide),
        f"{at}.mlp.down_proj.weight": draw.matrix(hidden, inner, _ADDED * deep),
    }


def _ones(shape: Shape) -> Any:
    return torch.ones(shape.hidden, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
