"""A program that reports as JSON what only an engine's own process can see, by parts.

    python -m tests.gpu.inside graphs cpu <folder of models>

It is a separate process because pytest's own must not take the device.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.engines.in_process import InProcessBackend
from tests.engines.llama import VOCABULARY, counted
from tests.gpu.device import MIB, Device
from tests.gpu.specs import spec_of
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import Backend
from worker.engines.loading import make_core_backend, prepare_host
from worker.models import ModelSpec

PROMPT = [3, 1, 40]
TOKENS = 24
BATCH = 64


def warm_backend(device: Device) -> Backend:
    """A warm process of a worker, as in the pool."""
    settings = WorkerSettings(redis_url="", device=device.name)
    prepare_host(settings)
    backend = InProcessBackend(make_core_backend(settings, 0))
    with _heard() as said:
        backend.warm_up()
    if said:
        raise RuntimeError("; ".join(said))
    return backend


@contextmanager
def _heard() -> Iterator[list[str]]:
    """The backend's warnings in the block: a warm-up continues if its model does not run."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(_in_words(record))  # type: ignore[method-assign]
    log = logging.getLogger("tokenyard.worker.engines")
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


def _in_words(record: logging.LogRecord) -> str:
    fault = record.exc_info[1] if record.exc_info else None
    return f"{record.getMessage()}: {fault!r}"


def graphs(device: Device, models: Path) -> dict[str, Any]:
    """Run batches; then load and unload models with CUDA graphs: the findings of each load."""
    backend = warm_backend(device)
    found = {"batches": _tried(lambda: batches(backend, device, models)), "lives": []}
    for name in ("llama-counts", "llama-counts", "qwen3-counts", "llama-counts"):
        spec = spec_of(device, name, models / name, enforce_eager=False, max_num_seqs=4)
        found["lives"].append(_tried(partial(_life, device, backend, spec)))
    return found


def _tried(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a step, or the end of its traceback: the next step runs anyway."""
    try:
        return step()
    except Exception:  # noqa: BLE001  # the test tells it
        return {"fault": traceback.format_exc()[-2500:]}


def _life(device: Device, backend: Backend, spec: ModelSpec) -> dict[str, Any]:
    from vllm.compilation.counter import compilation_counter

    from tests.engines.harness import greedy, run

    before = compilation_counter.clone()
    files = _compiled_files()
    engine = backend.load(spec)
    (outcome,) = run(engine, greedy(tokens=PROMPT, max_tokens=TOKENS))
    awake = device.used([os.getpid()])
    engine.close()
    return {
        "model": spec.name,
        "is_right": outcome.tokens == counted(PROMPT, TOKENS),
        "phases_s": engine.info.phases_s,
        "counters": {
            name: value - getattr(before, name)
            for name, value in dataclasses.asdict(compilation_counter).items()
            if value != getattr(before, name)
        },
        "new_files": len(_compiled_files() - files),
        "reserved_mib": round((backend.memory().device or 0) / MIB, 1),
        "used_mib": device.used([os.getpid()]) >> 20,
        "awake_mib": awake >> 20,
    }


def _compiled_files() -> set[str]:
    root = Path(os.environ["VLLM_CACHE_ROOT"]) / "torch_compile_cache"
    return {str(path) for path in root.rglob("*") if path.is_file()}


def cold_batches(device: Device, models: Path) -> dict[str, Any]:
    """Like `batches`, in a process that has computed nothing before."""
    settings = WorkerSettings(redis_url="", device=device.name)
    prepare_host(settings)
    return batches(InProcessBackend(make_core_backend(settings, 0)), device, models)


def batches(backend: Backend, device: Device, models: Path) -> dict[str, Any]:
    """The same prompts alone, alone again and all together, with random weights."""
    spec = spec_of(device, "llama", models / "llama", max_num_seqs=BATCH)
    draw = random.Random(8)
    prompts = [[draw.randrange(4, VOCABULARY) for _ in range(4 + at % 29)] for at in range(BATCH)]
    return {"prompts": BATCH, "tokens": TOKENS, **_compare(backend, spec, prompts)}


def _compare(backend: Backend, spec: ModelSpec, prompts: list[list[int]]) -> dict[str, Any]:
    from tests.engines.harness import greedy, run

    asked = [
        greedy(f"{at}-0", tokens=prompt, max_tokens=TOKENS) for at, prompt in enumerate(prompts)
    ]
    engine = backend.load(spec)
    alone = [run(engine, one)[0].tokens for one in asked]
    alone_again = [run(engine, one)[0].tokens for one in asked]
    together = [one.tokens for one in run(engine, *asked)]
    together_again = [one.tokens for one in run(engine, *asked)]
    engine.close()
    return {
        "alone_equal_alone": _equal(alone, alone_again),
        "together_equal_together": _equal(together, together_again),
        "together_equal_alone": _equal(alone, together),
    }


def _equal(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def main() -> None:
    """Print the answer as the last line of standard output; vLLM writes before it."""
    part, name, models = sys.argv[1:]
    parts = {"graphs": graphs, "batches": cold_batches}
    answer = parts[part](Device("cuda" if name == "cuda" else "cpu"), Path(models))
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
