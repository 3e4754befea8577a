"""The models files of `cold_start.py`: the arithmetic models, or two of a Llama of 1B shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.cold_start.case import MODELS
from benchmarks.device import on_gpu
from benchmarks.llama import SHAPES, model_spec, models_folder, shrunken, write_llama
from benchmarks.progress import tell
from worker.models import ModelSpec

Size = Literal["arithmetic", "1b"]

#: The same files under two names: two models for a worker, one for vLLM's compile cache.
_NAMES: Final = ("llama", "llama-again")
_MAX_NUM_SEQS: Final = 256


@contextmanager
def sized_models(size: Size, *, quick: bool) -> Iterator[Path]:
    """Make a models file with two models of this size; ``quick`` shrinks them."""
    if size == "arithmetic":
        yield MODELS
        return
    shape = shrunken(SHAPES[size]) if quick else SHAPES[size]
    with models_folder() as folder:
        tell(f"model: {shape.name}")
        spec = model_spec(shape, write_llama(shape, folder), _MAX_NUM_SEQS, gpu=on_gpu())
        models = folder / f"{shape.name}.toml"
        models.write_text("\n".join(_table(name, spec) for name in _NAMES))
        yield models


def _table(name: str, spec: ModelSpec) -> str:
    keys = ("path", "dtype", "max_model_len", "max_num_seqs", "enforce_eager", "kv_cache_gib")
    own = [_line(key, getattr(spec, key)) for key in keys]
    more = [_line(key, value) for key, value in spec.engine_args.items()]
    return "\n".join([f"[models.{name}]", *own, f"[models.{name}.engine_args]", *more, ""])


def _line(key: str, value: Any) -> str:
    return f"{key} = {json.dumps(value)}"
