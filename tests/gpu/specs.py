"""Models for the tests: on a GPU in bfloat16, with a cache large enough to show if it stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.engines.llama import Family
from tests.gpu.device import Device
from worker.models import ModelSpec

ADDERS = Path(__file__).parents[2] / "examples" / "arithmetic" / "models"
FAMILIES: tuple[Family, ...] = ("llama", "qwen3")
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def bounded(seconds: float) -> pytest.MarkDecorator:
    """The time limit of a test with its fixtures, on a GPU; a CPU gets more."""
    is_gpu = os.environ.get("TOKENYARD_TEST_DEVICE") == "cuda"
    return pytest.mark.timeout(seconds if is_gpu else 3 * seconds)


def spec_of(device: Device, name: str, path: Path, **fields: Any) -> ModelSpec:
    """A bfloat16 model that starts quickly.

    Without a prefix cache, so that a prompt is always computed in the same way.
    """
    known: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_num_seqs": 16,
        "enforce_eager": True,
        "kv_cache_gib": device.kv_cache_gib,
        "engine_args": {"enable_prefix_caching": False},
    }
    return ModelSpec(name=name, path=str(path), **(known | fields))


def adder_spec(device: Device, model: str, dtype: str, **fields: Any) -> ModelSpec:
    """A model of `examples/arithmetic`."""
    known: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 64}
    return spec_of(device, f"{model}-{dtype}", ADDERS / model, **(known | fields))
