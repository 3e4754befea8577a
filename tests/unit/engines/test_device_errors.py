"""Which faults of a GPU end their process."""

from __future__ import annotations

import pytest

from worker.engines import DeviceLost
from worker.engines.device import is_device_lost, is_out_of_memory, was_disturbed


class AcceleratorError(RuntimeError):
    """Has the name of torch's class."""


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's class."""


LOST = [
    AcceleratorError("an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("CUDA driver error: unspecified launch failure"),
    RuntimeError("NCCL error in: ../ProcessGroupNCCL.cpp:3690, unhandled cuda error"),
    RuntimeError("use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:2650"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    AssertionError("CuMem allocator can only be used for one instance per process."),
    DeviceLost("20 MiB of a model that is gone stay on the GPU"),
]
ENOUGH_LEFT = [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ValueError("Free memory on device cuda:0 is less than desired GPU memory utilization"),
    ValueError("CUDA error is a word in a model's name"),
    RuntimeError("size mismatch"),
    AssertionError("Error in memory profiling. Initial free memory 1 GiB"),
    FileNotFoundError("config.json"),
]


@pytest.mark.parametrize("fault", LOST, ids=str)
def test_a_cuda_error_ends_the_process(fault: Exception) -> None:
    assert is_device_lost(fault)


@pytest.mark.parametrize("fault", ENOUGH_LEFT, ids=str)
def test_any_other_error_keeps_the_process(fault: Exception) -> None:
    assert not is_device_lost(fault)


def test_the_cause_of_an_error_counts_too() -> None:
    fault = ValueError("the engine core has died")
    fault.__cause__ = LOST[0]

    assert is_device_lost(fault)
    assert not is_out_of_memory(fault)


def test_an_error_for_too_little_memory_is_recognized() -> None:
    assert [is_out_of_memory(fault) for fault in ENOUGH_LEFT] == [True] * 3 + [False] * 5


def test_a_measurement_spoiled_by_another_process_is_recognized() -> None:
    disturbed = [fault for fault in [*LOST, *ENOUGH_LEFT] if was_disturbed(fault)]

    assert disturbed == [ENOUGH_LEFT[3], ENOUGH_LEFT[6]]


def test_a_cyclic_chain_of_errors_is_followed_once() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one

    assert not is_device_lost(one)
