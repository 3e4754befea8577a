"""The models that a host may load: what an engine is told of each, and the file that lists them.

docs/models.md describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter; requests use its name as they use a model's."""

    name: str
    path: str  # a folder, or a Hugging Face name
    revision: str = ""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that an engine is to serve, and how; what is left out is the engine's choice."""

    name: str  # that requests use
    path: str  # a folder, or a name that vLLM can resolve
    revision: str = ""
    dtype: str = "auto"
    quantization: str = ""
    max_model_len: int | None = None  # tokens, prompt and output together
    max_num_seqs: int = 64  # requests that run at once
    enforce_eager: bool = False  # no compilation: starts sooner, and small models run as fast
    kv_cache_gib: float = 0.0  # 0: what the device has left
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    trust_remote_code: bool = False
    adapters: tuple[AdapterSpec, ...] = ()
    max_lora_rank: int = 16
    sampling: Mapping[str, Any] = field(default_factory=dict)  # where a request says nothing
    sleep_level: int = 1  # how deep it sleeps where a host keeps sleepers; 0: it is unloaded
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # more of vLLM's EngineArgs
    pin: int = 0  # workers in the yard that always hold it
    max_model_wait_s: float = 0.0  # longest wait of a request for its turn; 0: the yard's default

    @property
    def ranks(self) -> int:
        """Devices that it takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


Catalog = Mapping[str, ModelSpec]


def read_models(path: Path) -> dict[str, ModelSpec]:
    """The models of a file, by name.

    Raises `tokenyard.errors.SettingsError` with every fault of the file.
    """
    raise NotImplementedError
