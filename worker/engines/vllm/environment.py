"""What vLLM reads from the environment, to be set before it is imported.

The same for all processes of a host, so that one of them can import vLLM for all. This file
imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Final

_OMP_THREADS: Final = "OMP_NUM_THREADS"
#: Where the operator's own number of threads is kept while ours stands in its place.
_REQUESTED_THREADS: Final = "TOKENYARD_OMP_NUM_THREADS"


def engine_modules(*, cpu: bool) -> list[str]:
    """What an engine is made of; vLLM imports some of it with the first model only.

    None of them touches a device.
    """
    return [
        "worker.engines.vllm.engine",
        "worker.engines.vllm.made_up_model",
        f"vllm.v1.worker.{'cpu' if cpu else 'gpu'}_worker",
        "vllm.model_executor.models.llama",
    ]


def engine_environment(*, cpu: bool) -> dict[str, str]:
    """The variables that an in-process engine needs."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core steps in our own thread
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if not cpu and importlib.util.find_spec("flashinfer") is None:
        # vLLM would import it to sample with, and load no model at all.
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if cpu:
        environment[_OMP_THREADS] = "1"  # `worker.engines.cpu_threads` says why, and raises it
    return environment


def set_environment(environment: Mapping[str, str]) -> None:
    """Put variables in place; what the operator has set himself stays, or is remembered."""
    os.environ.setdefault(_REQUESTED_THREADS, os.environ.get(_OMP_THREADS, ""))
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if _OMP_THREADS in environment:
        os.environ[_OMP_THREADS] = environment[_OMP_THREADS]


def requested_threads() -> int:
    """What the operator has set for OpenMP, 0 where nothing."""
    requested = os.environ.get(_REQUESTED_THREADS, "")
    return int(requested) if requested.isdecimal() else 0
