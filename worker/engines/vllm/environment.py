"""The environment variables of vLLM, which must be set before its import.

They are the same for all processes of a host, so that the fork-server can import vLLM for all. This
module imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Final

from tokenyard.process.home import cache_environment, user_name

_OMP_THREADS: Final = "OMP_NUM_THREADS"
#: Keeps the operator's value while `_OMP_THREADS` has ours.
_REQUESTED_THREADS: Final = "TOKENYARD_OMP_NUM_THREADS"


def engine_modules(*, cpu: bool) -> list[str]:
    """The modules of an engine, some of which vLLM imports only with the first model.

    None of them touches a device.
    """
    return [
        "worker.engines.vllm.core_link",
        "worker.engines.vllm.engine",
        "worker.engines.vllm.made_up_model",
        f"vllm.v1.worker.{'cpu' if cpu else 'gpu'}_worker",
        "vllm.model_executor.models.llama",
    ]


def engine_environment(*, cpu: bool) -> dict[str, str]:
    """The variables of an in-process engine."""
    environment = {
        **cache_environment(),
        "USER": user_name(),  # torch names a folder after it
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in our thread
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if not cpu and importlib.util.find_spec("flashinfer") is None:
        # Otherwise vLLM imports it for sampling, and fails to load any model.
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if cpu:
        environment[_OMP_THREADS] = "1"  # `use_cores` explains and raises it
    return environment


def set_environment(environment: Mapping[str, str]) -> None:
    """Set variables; keep the operator's values, and remember that of OMP_NUM_THREADS."""
    os.environ.setdefault(_REQUESTED_THREADS, os.environ.get(_OMP_THREADS, ""))
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if _OMP_THREADS in environment:
        os.environ[_OMP_THREADS] = environment[_OMP_THREADS]


def requested_threads() -> int:
    """The operator's number of threads for OpenMP; 0: not set."""
    requested = os.environ.get(_REQUESTED_THREADS, "")
    return int(requested) if requested.isdecimal() else 0
