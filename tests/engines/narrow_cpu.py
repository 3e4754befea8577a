"""A process that believes that its CPU has fewer features; it imports nothing heavy before that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from worker.engines.vllm.environment import engine_environment, set_environment

#: vLLM's kernels for x86; vLLM loads one of them.
LIBRARIES = ("_C.abi3.so", "_C_AVX512.abi3.so", "_C_AVX2.abi3.so")


def come_up(pipe: Connection, features: Mapping[str, bool]) -> None:
    """Warm up and answer a sum; return the answer, vLLM's library, and torch's instruction set.

    ``features`` replace those that torch found; vLLM chooses by them.
    """
    set_environment(engine_environment(cpu=True))
    import torch

    real = dict(torch.cpu.get_capabilities())
    torch.cpu.get_capabilities = lambda: {**real, **features}
    from tests.engines.harness import ask, run, spec_of
    from tests.engines.in_process import InProcessBackend
    from worker.engines.vllm.backend import CoreBackend

    backend = InProcessBackend(CoreBackend(cores=[min(os.sched_getaffinity(0))]))
    backend.warm_up()
    engine = backend.load(spec_of("adder", dtype="bfloat16"))
    (outcome,) = run(engine, ask(prompt="12+34=", temperature=0.0))
    maps = Path("/proc/self/maps").read_text()
    used = [library for library in LIBRARIES if f"/{library}" in maps]
    pipe.send((outcome.choice.text, used, torch.backends.cpu.get_cpu_capability()))
    engine.close()
