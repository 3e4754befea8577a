"""A process gets its CPU permissions before its first model, on any CPU."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.engines.in_process import InProcessBackend
from tests.engines.narrow_cpu import come_up
from tests.engines.on_cpu import needs_cpu
from worker.engines import Backend, DeviceUnusable
from worker.engines.cpu_features import features_here, request_amx
from worker.engines.vllm.backend import CoreBackend

pytestmark = [pytest.mark.vllm, needs_cpu]

ARCH_GET_XCOMP_PERM = 0x1022
SYS_ARCH_PRCTL = 158
AMX_TILE_DATA = 18
WAIT_S = 300


def test_amx_is_requested_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[None] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: requests.append(None) or True)

    for has_amx, total in ((False, 0), (True, 1)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has_amx: has)
        request_amx()
        assert len(requests) == total


def test_a_kernel_that_refuses_amx_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)

    with pytest.raises(DeviceUnusable, match="kernel does not let this process use it"):
        request_amx()


def test_a_process_requests_amx_before_its_first_model(
    warm: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    del warm  # everything is imported
    events: list[str] = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: events.append("request") or True)
    first_model = "tests.engines.in_process.run_first_model"
    monkeypatch.setattr(first_model, lambda _: events.append("model"))

    InProcessBackend(CoreBackend(cores=[min(os.sched_getaffinity(0))])).warm_up()

    assert events == ["request", "model"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 CPU")
def test_a_warm_process_may_use_amx_where_the_cpu_has_it(warm: Backend) -> None:
    del warm  # this process is warm
    permitted = ctypes.c_uint64()
    status = ctypes.CDLL(None, use_errno=True).syscall(
        SYS_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(permitted)
    )
    has_amx = "amx_tile" in features_here()

    if not has_amx and status != 0:
        return  # the kernel is older than AMX support
    assert bool(permitted.value >> AMX_TILE_DATA & 1) == has_amx


@pytest.mark.skipif(
    "avx512_bf16" not in features_here(),
    reason="needs a CPU that has more than the test takes away",
)
@pytest.mark.parametrize(
    ("environment", "features", "expected"),
    [
        (
            {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
            {"avx512_f": False, "avx512_bf16": False, "amx_tile": False},
            ("46", ["_C_AVX2.abi3.so"], "AVX2"),
        ),
        (
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
            {"avx512_bf16": False, "amx_tile": False},
            ("46", ["_C_AVX512.abi3.so"], "AVX512"),
        ),
        (
            # vLLM's kernels for AMX need a oneDNN that may use it.
            {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
            {"amx_tile": False},
            ("46", ["_C.abi3.so"], "AVX2"),
        ),
    ],
    ids=["avx2 only", "no bfloat16", "libraries held to avx2"],
)
@pytest.mark.long
def test_a_process_warms_up_with_fewer_instruction_sets(
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str],
    features: Mapping[str, bool],
    expected: Any,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=come_up, args=(theirs, features))
    process.start()
    theirs.close()

    try:
        assert ours.poll(WAIT_S), "it does not come up"
        assert ours.recv() == expected
    finally:
        process.join(60)
        process.kill()
