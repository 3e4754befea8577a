"""Drives the worker process that `cycles.py` measures: loads and unloads models.

Arguments: the number of cycles, the pool's floor in MiB, and the file for the JSON report.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.sums import ADDER, ANSWER_TOKENS, SUBTRACTOR, questions
from benchmarks.yard import end_in_order
from worker import EngineHandle, ProcessStatus, WorkerController
from worker.engines import Memory

MODELS: Final = Path(__file__).parent / "models.toml"
#: Questions per engine.
BATCH: Final = 64
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Cycle:
    """One load and unload of a model."""

    seconds: float
    wrong: int
    warm: Memory  # of the process before its first model
    loaded: Memory
    after: Memory | None  # None if the process was replaced

    @property
    def kept(self) -> float:
        """Memory kept after the unload, relative to the warm memory; the GPU's if there is one."""
        return self.after.scarce / self.warm.scarce - 1.0 if self.after else 0.0


def main() -> None:
    """Run all cycles in sequence on one device."""
    end_in_order()
    cycles, floor_mib, report = sys.argv[1:]
    with WorkerController(
        MODELS, timeout_s=_TIMEOUT_S, leak_floor_mib=float(floor_mib)
    ) as controller:
        controller.wait_warm()
        done = [cycle(controller, (ADDER, SUBTRACTOR)[at % 2]) for at in range(int(cycles))]
    Path(report).write_bytes(msgspec.json.encode(done))


def cycle(controller: WorkerController, model: str) -> Cycle:
    """Load a model, ask it, unload it."""
    began = time.perf_counter()
    engine = controller.create(model)
    seconds = time.perf_counter() - began
    wrong = _ask(engine)
    [loaded] = controller.status()
    began = time.perf_counter()
    controller.delete(engine)
    seconds += time.perf_counter() - began
    controller.wait_warm()  # in case the process is being replaced
    [after] = controller.status()
    is_same = after.pid == loaded.pid
    return Cycle(
        seconds,
        wrong,
        _measured(loaded, loaded.baseline),
        _measured(loaded, loaded.memory),
        _measured(after, after.memory) if is_same else None,
    )


def _ask(engine: EngineHandle) -> int:
    """Ask a batch of questions; returns the number of wrong answers."""
    asked = questions([engine.model], BATCH)
    results = engine.generate(
        [one.prompt for one in asked], max_tokens=ANSWER_TOKENS, temperature=0.0
    )
    return sum(one.answer != result.text for one, result in zip(asked, results, strict=True))


def _measured(status: ProcessStatus, memory: Memory | None) -> Memory:
    if memory is None:
        raise RuntimeError(f"nothing was measured: {status}")
    return memory


if __name__ == "__main__":
    main()
