"""Times a warm process: a first model, a swap to another, and that one's wake from sleep."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.child import run_child
from benchmarks.cold_start.case import TIMEOUT_S, Task, Timed, tasks
from benchmarks.device import on_gpu
from benchmarks.sums import ANSWER_TOKENS
from benchmarks.yard import end_in_order
from tokenyard.protocol.replies import Result
from worker import EngineHandle, WorkerController

Parts = dict[str, Timed]

#: Name of the time outside all phases: pipes, threads, the pool's own steps.
_REST: Final = "pool"


def measure_warm(models: Path) -> Parts:
    """Time all parts in a program that starts one process and waits until it is warm."""
    return msgspec.convert(run_child("benchmarks.cold_start.warm", [str(models)]), Parts)


def main() -> None:
    """Run the program; its arguments are the models file and the file for the report."""
    end_in_order()
    models, report = map(Path, sys.argv[1:])
    wake = "wake" if on_gpu() else "wake_cpu"
    began = time.perf_counter()
    with WorkerController(models, timeout_s=TIMEOUT_S) as controller:
        controller.wait_warm()
        [process] = controller.status()
        paid = Timed(time.perf_counter() - began, process.phases_s).with_rest("process")
        parts = {"paid_before": paid, **_measure(controller, wake, *tasks(models))}
    report.write_bytes(msgspec.json.encode(parts))


def _measure(controller: WorkerController, wake: str, first: Task, second: Task) -> Parts:
    engine, created = _time(first, lambda: (controller.create(first.model.name), {}))

    def swap() -> tuple[EngineHandle, Mapping[str, float]]:
        began = time.perf_counter()
        controller.delete(engine)
        unload_s = time.perf_counter() - began
        return controller.create(second.model.name), {"unload": unload_s}

    engine_2, swapped = _time(second, swap)
    return {
        "warm_create": created,
        "swap": swapped,
        wake: _wake(engine_2, second, 1),
        f"{wake}_2": _wake(engine_2, second, 2),
    }


def _wake(engine: EngineHandle, task: Task, level: int) -> Timed:
    """Time a wake from sleep; raises `RuntimeError` if the engine was unloaded instead."""
    engine.sleep(level)

    def wake() -> tuple[EngineHandle, Mapping[str, float]]:
        engine.wake()
        return engine, {}

    _, woken = _time(task, wake)
    if "wake" not in woken.phases_s:
        raise RuntimeError(f"{task.model.name} did not sleep at level {level}")
    return woken


def _time(
    task: Task, bring_up: Callable[[], tuple[EngineHandle, Mapping[str, float]]]
) -> tuple[EngineHandle, Timed]:
    """Time from now until the engine that ``bring_up`` starts has its first token."""
    began = time.perf_counter()
    engine, before_s = bring_up()
    up = time.perf_counter()
    pieces = engine.stream(task.prompt, max_tokens=ANSWER_TOKENS, temperature=0.0)
    next(pieces)
    end = time.perf_counter()
    [result] = [piece for piece in pieces if isinstance(piece, Result)]
    task.check(f"engine of {task.model.name}", result.text or "")
    phases_s = {**before_s, **engine.phases_s, "first token": end - up}
    return engine, Timed(end - began, phases_s).with_rest(_REST)


if __name__ == "__main__":
    main()
