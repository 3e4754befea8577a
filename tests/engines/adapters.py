"""LoRA adapters with random weights, and models with an adapter merged into their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from worker.models import AdapterSpec

RANK = 8
ALPHA = 16
PROJECTIONS = ("q_proj", "v_proj", "o_proj", "up_proj")


def write_adapter(folder: Path, model: Path, seed: int) -> AdapterSpec:
    """Write an adapter for an example model, in PEFT's format."""
    import torch
    from safetensors.torch import load_file, save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] not in PROJECTIONS:
            continue
        rows, columns = weight.shape
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(RANK, columns, generator=random)
        tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=random)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(PROJECTIONS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return AdapterSpec(folder.name, str(folder))


def merge(folder: Path, model: Path, adapter: AdapterSpec) -> Path:
    """The model with the weights of ``model`` plus the adapter."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    added = load_file(Path(adapter.path) / "adapter_model.safetensors")
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in added:
            product = added[f"{prefix}.lora_B.weight"] @ added[f"{prefix}.lora_A.weight"]
            weights[name] += ALPHA / RANK * product
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
