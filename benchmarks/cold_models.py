"""The models files of `cold_start.py`: the arithmetic models, or two Llamas of 1B shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from benchmarks.cold_case import MODELS
from benchmarks.device import on_gpu
from benchmarks.llama import SHAPES, counting_in_twos, models_folder, shrunken, write_llama
from benchmarks.progress import tell

Size = Literal["arithmetic", "1b"]

#: As vLLM does by itself, with CUDA graphs, but for limits that it chooses by who asks, and the KV
#: cache: a process that sleeps, or is only warm, has some of the memory.
_DEFAULTS: Final = """[defaults]
dtype = "bfloat16"
max_model_len = 2048
max_num_seqs = 256
kv_cache_gib = {kv_cache_gib}
enforce_eager = {eager}

[defaults.engine_args]
max_num_batched_tokens = 8192
"""


@contextmanager
def sized_models(size: Size, *, quick: bool) -> Iterator[Path]:
    """A models file with two models of this size; ``quick``: shrunken ones."""
    if size == "arithmetic":
        yield MODELS
        return
    shape = shrunken(SHAPES[size]) if quick else SHAPES[size]
    with models_folder() as folder:
        text = _DEFAULTS.format(
            kv_cache_gib=8.0 if on_gpu() else 0.25, eager=str(not on_gpu()).lower()
        )
        for name, each in (("llama", shape), ("llama-twos", counting_in_twos(shape))):
            tell(f"model: {each.name}")
            path = json.dumps(str(write_llama(each, folder)))
            text += f"\n[models.{name}]\npath = {path}\n"
        models = folder / f"{shape.name}.toml"
        models.write_text(text)
        yield models
