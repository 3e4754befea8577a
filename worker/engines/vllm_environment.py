"""What vLLM reads from the environment, to be set before it is imported.

This file imports nothing heavy, so that a process can prepare itself first.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from worker.models import ModelSpec

if TYPE_CHECKING:
    from worker.engines.vllm_engine import VllmEngine


def engine_environment(
    *, cpu: bool, kv_cache_gib: float = 1.0, cores: Sequence[int] = ()
) -> dict[str, str]:
    """The variables that an in-process engine needs.

    ``cores`` (CPU only) binds its threads to these cores, one thread to each; none leaves them
    unbound, as many as there are cores. Give every engine cores of its own: OpenMP's threads
    spin, so two engines on the same cores are ten times slower than one. The KV cache of the CPU
    backend is a whole number of GiB here; `ModelSpec.kv_cache_gib` is finer.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core steps in our own thread
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if cpu:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, math.ceil(kv_cache_gib))),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)) or "nobind",
        }
    if cpu and cores:
        environment["OMP_NUM_THREADS"] = str(len(cores))
    return environment


def set_environment(environment: Mapping[str, str]) -> None:
    """Put variables in place; what the operator has set himself stays."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def open_vllm(spec: ModelSpec) -> VllmEngine:
    """Import vLLM and load a model; set the environment first.

    Raises what vLLM raises where the model cannot be loaded.
    """
    started = time.perf_counter()
    from worker.engines.vllm_engine import VllmEngine

    return VllmEngine(spec, import_s=time.perf_counter() - started)
