"""Trains a LoRA adapter that makes the adder subtract.

The adder's own weights do not change. The result is a folder in PEFT's format, which vLLM reads;
PEFT itself is not needed.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.utils import logging

from problems import CHECKED_NUMBERS, TRAINING_NUMBERS, Operation
from train import Recipe, Score, build_table, console, score, train

HERE = Path(__file__).parent
# The layers that the adapter changes: all linear layers of a block.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layers(model: LlamaForCausalLM) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that the adapter changes, by name."""
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            yield name, layer


def adapt(model: LlamaForCausalLM, rank: int, alpha: int) -> None:
    """Freeze ``model`` and add a low-rank pair to each layer, initially without effect."""
    model.requires_grad_(False)
    for _, layer in list(layers(model)):
        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(up.weight)
        layer.pair = nn.Sequential(down, up)
        layer.register_forward_hook(
            lambda layer, inputs, output: output + layer.pair(inputs[0]) * (alpha / rank)
        )


def weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The low-rank pairs by PEFT's names: A of shape [rank, in], B of shape [out, rank]."""
    found: dict[str, Tensor] = {}
    for name, layer in layers(model):
        down, up = layer.pair
        found[f"base_model.model.{name}.lora_A.weight"] = down.weight.detach()
        found[f"base_model.model.{name}.lora_B.weight"] = up.weight.detach()
    return found


def save(model: LlamaForCausalLM, folder: Path, base: str, rank: int, alpha: int) -> None:
    """Write the adapter in PEFT's format."""
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(configuration, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    save_file(weights(model), folder / "adapter_model.safetensors", {"format": "pt"})


def make(base: Path, recipe: Recipe, rank: int, alpha: int, out: Path) -> Score:
    """Train, save and grade the adapter."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM.from_pretrained(base)
    adapt(model, rank, alpha)
    started = time.monotonic()
    train(model, build_table(Operation.SUBTRACT, TRAINING_NUMBERS), recipe)
    seconds = time.monotonic() - started
    save(model, out, base.name, rank, alpha)
    result = score(model, build_table(Operation.SUBTRACT, CHECKED_NUMBERS))
    console.print(
        f"{out.name}: {result.right}/{result.total} right, "
        f"weakest right token {result.weakest:.4f}, trained in {seconds:.0f} s"
    )
    return result


@click.command(help="Train the adapter that makes the adder subtract.")
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=HERE / "models/adder",
    help="The model that it changes.  [default: models/adder, beside this script]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=HERE / "models/adder-subtracts",
    help="Folder of the adapter.  [default: models/adder-subtracts, beside this script]",
)
@click.option("--rank", type=click.IntRange(1, 64), default=16, show_default=True)
@click.option("--alpha", type=click.IntRange(1), default=32, show_default=True)
@click.option("--steps", type=click.IntRange(min=100), default=1500, show_default=True)
@click.option("--batch", type=click.IntRange(1, 10_000), default=512, show_default=True)
@click.option("--learning-rate", type=float, default=5e-3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(
    base: Path,
    out: Path,
    rank: int,
    alpha: int,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train the adapter; exits with 1 if too few answers are right."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # another number rounds differently and gives other weights
    torch.use_deterministic_algorithms(True)
    recipe = Recipe(steps, batch, learning_rate, seed)
    sys.exit(0 if make(base, recipe, rank, alpha, out).is_enough else 1)


if __name__ == "__main__":
    main()
