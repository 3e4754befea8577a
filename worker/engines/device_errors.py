"""Classifies errors of a device: whether the process must end, or may try again.

After most CUDA errors (CUDA calls them sticky) every later call in the process fails too. Running
out of memory is no such error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from worker.engines import DeviceLost

#: Errors of CUDA, and of the libraries and allocators that use it.
_LOST: Final = re.compile(
    r"CUDA error|CUDA driver error|CUDA kernel errors|cudaError|CUDNN_STATUS|CUBLAS_STATUS"
    r"|NCCL error|CUDA Error: |CUDACachingAllocator|CuMem allocator|Triton Error \[CUDA\]"
)
_MEMORY: Final = re.compile(
    r"out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)
#: vLLM measured the free memory while another process allocated or freed some.
_DISTURBED: Final = re.compile(
    r"Error in memory profiling|less than desired GPU memory utilization"
)


def is_device_lost(error: BaseException) -> bool:
    """Whether the process must end because it can no longer use the GPU."""
    return any(isinstance(one, DeviceLost) or _is_lost(one) for one in _causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU ran out of memory."""
    return any(_MEMORY.search(str(one)) for one in _causes(error))


def was_disturbed(error: BaseException) -> bool:
    """Whether another process interfered, so that a retry can succeed."""
    return any(_DISTURBED.search(str(one)) for one in _causes(error))


def _is_lost(error: BaseException) -> bool:
    # By name: only torch 2.9 and later has it. Its subclasses and plain errors match by text.
    is_cuda = type(error).__name__ == "AcceleratorError" or _LOST.search(str(error)) is not None
    is_runtime = isinstance(error, (RuntimeError, AssertionError))
    return is_cuda and is_runtime and _MEMORY.search(str(error)) is None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
