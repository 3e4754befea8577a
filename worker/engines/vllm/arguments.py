"""A `ModelSpec` as vLLM's arguments."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Final

import torch
from vllm import EngineArgs
from vllm.config import ProfilerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.abstract import Executor

from worker.engines.prompts import has_tokenizer
from worker.engines.vllm.executor import (
    DEFAULT_KV_CACHE_BYTES,
    SingleExecutor,
    ThriftyExecutor,
)
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.engines")

_GIB: Final = 1024**3
#: LoRA adapters that one step may use on a GPU; each takes memory for the largest rank.
_MAX_LORAS: Final = 8
#: The part of a GPU that an engine leaves free beside itself: for CUDA graphs, which not every
#: vLLM counts, and for the CUDA contexts of processes that are still to come.
_KEPT_FREE: Final = 0.04
#: vLLM wants some; where that is not free either, it says so.
_LEAST: Final = 0.001


def engine_config(
    spec: ModelSpec, device: int, executor: type[Executor] | None = None, weights: str = ""
) -> VllmConfig:
    """The whole configuration of an engine; arguments in ``spec.engine_args`` win.

    ``device`` is the GPU of this process, ``executor`` what finds the ranks of a group, and
    ``weights`` the folder of those that stand in for the model's own. Raises what vLLM raises
    where the model, or an argument, makes no sense.
    """
    alone = None if executor else device
    arguments = EngineArgs(**_arguments(spec, executor) | _memory(spec, alone) | _nested(spec))
    # vLLM's own limits on the tokens of a step depend on who asks: as of its server, not of nobody.
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if weights:
        # Only weights are read from there: a checkpoint of a training run need hold nothing else.
        config.model_config.hf_config_path = config.model_config.hf_config_path or spec.path
        config.model_config.model = weights
    if config.parallel_config.distributed_executor_backend in (SingleExecutor, ThriftyExecutor):
        _place(config, device)
    return config


def cache_tokens(config: VllmConfig) -> int:
    """Tokens that the prefix cache of an engine holds, about, once it runs; 0: it has none."""
    cache = config.cache_config
    return cache.block_size * (cache.num_gpu_blocks or 0) if cache.enable_prefix_caching else 0


def lora_requests(spec: ModelSpec) -> dict[str, LoRARequest]:
    """The adapters of a model by name, as vLLM asks for them; downloads those that are not here."""
    return {
        adapter.name: LoRARequest(adapter.name, number, folder_of(adapter.path, adapter.revision))
        for number, adapter in enumerate(spec.adapters, start=1)
    }


def folder_of(path: str, revision: str) -> str:
    """A folder; of a Hugging Face name its own, where vLLM could take it in another revision."""
    if not revision or Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    return snapshot_download(path, revision=revision)


def _place(config: VllmConfig, device: int) -> None:
    """Say which device the one rank takes."""
    if config.parallel_config.world_size > 1:  # it would wait for the others for half an hour
        raise ValueError(
            f"this model takes {config.parallel_config.world_size} devices; load it with a group"
        )
    if not current_platform.is_cpu():
        # From here vLLM's executor of one process takes its local rank.
        config.device_config.device = torch.device(current_platform.device_type, device)


def _arguments(spec: ModelSpec, executor: type[Executor] | None) -> dict[str, Any]:
    named: dict[str, Any] = {
        "model": spec.path,
        "revision": spec.revision or None,
        "dtype": _dtype(spec),
        "quantization": spec.quantization or None,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": spec.enforce_eager,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "pipeline_parallel_size": spec.pipeline_parallel_size,
        "trust_remote_code": spec.trust_remote_code,
        "skip_tokenizer_init": not has_tokenizer(spec.path),
        "distributed_executor_backend": executor or _single(spec),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "scheduling_policy": "priority",  # a request's priority acts inside the engine too
    }
    return named | _lora(spec)


def _dtype(spec: ModelSpec) -> str:
    """The model's own, but that vLLM's kernels for adapters on a GPU take 16 bits only."""
    if not spec.adapters or current_platform.is_cpu() or spec.dtype not in {"float", "float32"}:
        return spec.dtype
    log.warning(
        "%s: on a GPU a model with adapters needs 16 bits: not float32, but auto", spec.name
    )
    return "auto"


def _single(spec: ModelSpec) -> type[Executor]:
    is_thrifty = current_platform.is_cpu() and not spec.kv_cache_gib
    return ThriftyExecutor if is_thrifty else SingleExecutor


def utilization(free: int, total: int, most: float) -> float:
    """How much of a GPU an engine may take, as a part of all its memory in bytes.

    vLLM refuses to start where less than ``most``, its default, is free: there processes of the
    pool are that wait or sleep. So it is as much as there is room for.
    """
    room = free / total - _KEPT_FREE
    return max(_LEAST, min(most, math.floor(room * 1000) / 1000))


def _memory(spec: ModelSpec, device: int | None) -> dict[str, Any]:
    """What it may take; ``device`` is the GPU that it has for itself, None in a group."""
    cache_bytes = int(spec.kv_cache_gib * _GIB)
    if current_platform.is_cpu():
        return {"kv_cache_memory_bytes": cache_bytes or DEFAULT_KV_CACHE_BYTES}
    named: dict[str, Any] = {}
    if spec.sleep_level and current_platform.is_sleep_mode_available():
        named["enable_sleep_mode"] = True
    if cache_bytes:
        named["kv_cache_memory_bytes"] = cache_bytes
    if device is not None:
        free, total = torch.cuda.mem_get_info(device)
        most = EngineArgs.gpu_memory_utilization
        named["gpu_memory_utilization"] = utilization(free, total, most)
    return named


def _lora(spec: ModelSpec) -> dict[str, Any]:
    if not spec.adapters:
        return {}
    count = len(spec.adapters)
    # On a CPU vLLM gives a request for the base model the adapter in the last place, where others
    # of its batch have adapters (vLLM pull request 48421). Nobody ever takes the place added here.
    places = count + 1 if current_platform.is_cpu() else min(count, _MAX_LORAS)
    return {
        "enable_lora": True,
        "max_loras": places,
        "max_cpu_loras": max(count, places),
        "max_lora_rank": spec.max_lora_rank,
    }


def _nested(spec: ModelSpec) -> dict[str, Any]:
    """The engine arguments of the spec; vLLM turns most tables to its own types, but not all."""
    given = dict(spec.engine_args)
    profiler = given.get("profiler_config")
    if isinstance(profiler, dict):
        given["profiler_config"] = ProfilerConfig(**profiler)
    return given
