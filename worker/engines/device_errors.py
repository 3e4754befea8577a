"""What a fault says of the device: whether the process may go on with it, or try again.

After most CUDA errors nothing works any more in the process that had them (CUDA calls them
sticky), whatever it loads. Memory that does not suffice is no such error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from worker.engines import DeviceLost

#: Errors of CUDA, and of the libraries and allocators on top of it.
_LOST: Final = re.compile(
    r"CUDA error|CUDA driver error|CUDA kernel errors|cudaError|CUDNN_STATUS|CUBLAS_STATUS"
    r"|NCCL error|CUDA Error: |CUDACachingAllocator|CuMem allocator|Triton Error \[CUDA\]"
)
_MEMORY: Final = re.compile(
    r"out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)
#: vLLM has measured the free memory while another process took or freed some.
_DISTURBED: Final = re.compile(
    r"Error in memory profiling|less than desired GPU memory utilization"
)


def is_device_lost(error: BaseException) -> bool:
    """Whether the process must end: the GPU, or what it has there, is of no use to it."""
    return any(isinstance(one, DeviceLost) or _is_lost(one) for one in _causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the GPU did not suffice."""
    return any(_MEMORY.search(str(one)) for one in _causes(error))


def was_disturbed(error: BaseException) -> bool:
    """Whether another process came between, so that the same can succeed the next time."""
    return any(_DISTURBED.search(str(one)) for one in _causes(error))


def _is_lost(error: BaseException) -> bool:
    # By name: torch has it from 2.9 on. Its subclasses, and plain errors, say the same in words.
    is_cuda = type(error).__name__ == "AcceleratorError" or _LOST.search(str(error)) is not None
    is_runtime = isinstance(error, (RuntimeError, AssertionError))
    return is_cuda and is_runtime and _MEMORY.search(str(error)) is None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
