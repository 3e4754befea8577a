"""Turns a `ModelSpec` to vLLM's arguments."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import vllm.config
from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.abstract import Executor

from worker.engines.prompts import has_tokenizer
from worker.engines.vllm.executor import DEFAULT_KV_CACHE_BYTES, SingleExecutor, ThriftyExecutor
from worker.models import ModelSpec

log = logging.getLogger("tokenyard.worker.engines")

_GIB: Final = 1024**3
#: Most LoRA adapters in one step on a GPU; each takes memory for the largest rank.
_MAX_LORAS: Final = 8
#: The part of a GPU's memory that an engine leaves free: for CUDA graphs, which not every version
#: of vLLM counts, and for the CUDA contexts of processes that start later.
_KEPT_FREE: Final = 0.04
#: vLLM refuses zero. If even this part is not free, vLLM raises.
_LEAST: Final = 0.001


def engine_config(
    spec: ModelSpec, device: int, executor: type[Executor] | None = None, weights: str = ""
) -> VllmConfig:
    """The whole configuration of an engine; arguments in ``spec.engine_args`` take precedence.

    ``device`` is the GPU of this process, ``executor`` the executor of a group, and ``weights`` the
    folder of a checkpoint that replaces the model's own weights. Raises vLLM's errors for an
    invalid model or argument.
    """
    alone = None if executor else device
    arguments = EngineArgs(**_arguments(spec, executor) | _memory(spec, alone) | _nested(spec))
    # vLLM's default limits on the tokens of a step depend on the context: take those of its server.
    with _reasons_named():
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if weights:
        # vLLM reads only weights from there: a checkpoint of a training run need hold nothing else.
        config.model_config.hf_config_path = config.model_config.hf_config_path or spec.path
        config.model_config.model = weights
    if config.parallel_config.distributed_executor_backend in (SingleExecutor, ThriftyExecutor):
        _place(config, device)
    return config


#: Where the last error of a traceback begins, which may have several lines.
_ERROR: Final = re.compile(r"(?m)^(?=[\w.]*Error: )")


@contextmanager
def _reasons_named() -> Iterator[None]:
    """Raise why vLLM could not inspect a model's class, mostly a missing package: it logs that."""
    logged: list[str] = []
    log_of_vllm = logging.getLogger("vllm.model_executor.models.registry")

    def keep(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:  # of a subprocess it has the whole output
            logged.append(_ERROR.split(str(error).strip())[-1])
        return True

    log_of_vllm.addFilter(keep)
    try:
        yield
    except ValueError as error:
        if not logged or "failed to be inspected" not in str(error):
            raise
        raise ValueError(f"vLLM cannot import the model's class: {logged[-1]}") from error
    finally:
        log_of_vllm.removeFilter(keep)


def cache_tokens(config: VllmConfig) -> int:
    """Approximate capacity in tokens of the prefix cache of a running engine; 0: no cache."""
    cache = config.cache_config
    return cache.block_size * (cache.num_gpu_blocks or 0) if cache.enable_prefix_caching else 0


def lora_requests(spec: ModelSpec) -> dict[str, LoRARequest]:
    """The adapters of a model by name, for vLLM; downloads those that are missing."""
    return {
        adapter.name: LoRARequest(adapter.name, number, folder_of(adapter.path, adapter.revision))
        for number, adapter in enumerate(spec.adapters, start=1)
    }


def folder_of(path: str, revision: str) -> str:
    """The path; a Hugging Face name with a revision becomes the folder of that download."""
    if not revision or Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    return snapshot_download(path, revision=revision)


def _place(config: VllmConfig, device: int) -> None:
    """Set the device of the only rank; raises `ValueError` if the model has several ranks."""
    if config.parallel_config.world_size > 1:  # vLLM would wait half an hour for the others
        raise ValueError(
            f"this model takes {config.parallel_config.world_size} devices; load it with a group"
        )
    if not current_platform.is_cpu():
        # vLLM's executor of one process takes its local rank from here.
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
        # The cache of a front assumes that its core has seen all that it has.
        "mm_processor_cache_gb": 0,
        "scheduling_policy": "priority",  # apply a request's priority in the engine too
    }
    # Constraints on the text begin where the reasoning ends, which only this parser finds.
    if parser := spec.serve_args.get("reasoning_parser"):
        named["reasoning_parser"] = parser
    return named | _lora(spec)


def _dtype(spec: ModelSpec) -> str:
    """The dtype of the spec; with adapters on a GPU not float32, as vLLM's kernels need 16 bits."""
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
    """The part (0 to 1) of a GPU's memory that an engine may take, at most ``most``.

    ``free`` and ``total`` are in bytes. vLLM refuses to start if less than the configured part is
    free, and other processes of the pool take memory while they wait or sleep. So the part follows
    the free memory.
    """
    room = free / total - _KEPT_FREE
    return max(_LEAST, min(most, math.floor(room * 1000) / 1000))


def _memory(spec: ModelSpec, device: int | None) -> dict[str, Any]:
    """The arguments for memory; ``device`` is the GPU of a single process, None in a group."""
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
    # On a CPU vLLM applies the adapter in the last place to requests for the base model, if others
    # in the batch have adapters (vLLM pull request 48421). The place added here stays empty.
    places = count + 1 if current_platform.is_cpu() else min(count, _MAX_LORAS)
    return {
        "enable_lora": True,
        "max_loras": places,
        "max_cpu_loras": max(count, places),
        "max_lora_rank": spec.max_lora_rank,
    }


def _nested(spec: ModelSpec) -> dict[str, Any]:
    """The engine arguments of the spec; converts a table that vLLM does not convert itself."""
    given = dict(spec.engine_args)
    if isinstance(given.get("reasoning_config"), dict):
        given["reasoning_config"] = vllm.config.ReasoningConfig(**given["reasoning_config"])
    if isinstance(given.get("pooler_config"), dict):
        given["pooler_config"] = vllm.config.PoolerConfig(**given["pooler_config"])
    return given
