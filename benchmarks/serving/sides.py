"""The sides of `serving.py`: the engines, all with the same model and settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import psutil

from benchmarks.cold_start.case import WrongAnswer
from benchmarks.cold_start.serve import Front
from benchmarks.measure import cpu_seconds
from benchmarks.serving.case import Load, Outcome, Workload
from benchmarks.serving.child import engine_child
from benchmarks.serving.http import http_server
from benchmarks.serving.yard import tokenyard

#: Engines, each of which has one or more sides.
Engine = Literal["program", "async", "serve", "rust", "tokenyard"]
#: Waits until an engine is ready; returns its sides.
Ready = Callable[[], Mapping[str, "Side"]]
#: The sides of each engine, named as in `serving.SIDES`; the most important first.
OF_ENGINE: Final[Mapping[Engine, tuple[str, ...]]] = {
    "program": ("generate", "stepped"),
    "tokenyard": ("tokenyard", "tokenyard_stream"),
    "serve": ("serve", "serve_stream"),
    "rust": ("rust_stream",),
    "async": ("async",),
}
#: Sides of `serving.py` with streams.
STREAMED: Final = ("stepped", "tokenyard_stream", "async", "serve_stream")
#: Engines that `serving.py` compares.
EVERYBODY: Final[tuple[Engine, ...]] = ("tokenyard", "program", "async", "serve")
_FRONTS: Final[Mapping[Engine, Front]] = {"serve": "vllm", "rust": "vllm-rs"}


@dataclass(frozen=True, slots=True)
class Side:
    """A way to run a load, and the processes that take part."""

    run: Callable[[Load], Outcome]
    pids: Sequence[int]
    broker_pids: Sequence[int] = ()  # a part of its processes

    def put(self, load: Load, name: str) -> Outcome:
        """Put a load on this side; raises `WrongAnswer`."""
        pids = {"all": self.pids, "broker": self.broker_pids}
        before = cpu_seconds(pids)
        outcome = self.run(load)
        if outcome.faults:
            raise WrongAnswer(f"{name}: " + "\n".join(outcome.faults))
        spent = {group: now - before[group] for group, now in cpu_seconds(pids).items()}
        return dataclasses.replace(outcome, cpu_s=spent["all"], broker_cpu_s=spent["broker"])


def begin(engine: Engine, workload: Workload, stack: ExitStack) -> Ready:
    """Start an engine, which ends with the stack; a yard starts only when it is waited for."""
    if engine == "tokenyard":
        return lambda: dict.fromkeys(OF_ENGINE["tokenyard"], yard_side(workload, 1, stack))
    if front := _FRONTS.get(engine):
        server = stack.enter_context(http_server(workload, front))

        def served() -> Mapping[str, Side]:
            server.wait_until_ready()
            side = Side(server.run, [os.getpid(), *family(server.pid)])
            return dict.fromkeys(OF_ENGINE[engine], side)

        return served
    kind: Literal["async", "program"] = "async" if engine == "async" else "program"
    child = stack.enter_context(engine_child(kind, workload))

    def loaded() -> Mapping[str, Side]:
        child.wait_until_ready()
        if engine == "async":
            return {"async": Side(partial(child.run, "streamed"), family(child.pid))}
        return {
            "generate": Side(partial(child.run, "generate"), [child.pid]),
            "stepped": Side(partial(child.run, "stepped"), [child.pid]),
        }

    return loaded


def yard_side(workload: Workload, workers: int, stack: ExitStack) -> Side:
    """Start a yard, and wait until its workers are ready."""
    yard = stack.enter_context(tokenyard(workload, workers))
    return Side(yard.run, yard.pids, yard.yard.pids["broker"])


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
