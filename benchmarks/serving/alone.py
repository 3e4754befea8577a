"""The engines of `serving.py --shape`, as many at a time as the GPU has room for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Final, Literal

from benchmarks.serving.case import Workload
from benchmarks.serving.child import engine_child
from benchmarks.serving.http import http_server
from benchmarks.serving.stage import Side, family
from benchmarks.serving.yard import tokenyard

#: Engines, each of which has one or more sides.
Engine = Literal["program", "async", "serve", "tokenyard"]
#: Waits until an engine is ready; returns its sides.
Ready = Callable[[], Mapping[str, Side]]
#: The sides of each engine, named as in `serving.SIDES`; the most important first.
OF_ENGINE: Final[Mapping[Engine, tuple[str, ...]]] = {
    "program": ("generate", "stepped"),
    "tokenyard": ("tokenyard", "tokenyard_stream"),
    "serve": ("serve", "serve_stream"),
    "async": ("async",),
}


def begin(engine: Engine, workload: Workload, stack: ExitStack) -> Ready:
    """Start an engine, which ends with the stack; a yard starts only when it is waited for."""
    if engine == "tokenyard":
        return partial(_yard, workload, stack)
    if engine == "serve":
        server = stack.enter_context(http_server(workload))

        def served() -> Mapping[str, Side]:
            server.wait_until_ready()
            side = Side(server.run, [os.getpid(), *family(server.pid)])
            return dict.fromkeys(OF_ENGINE["serve"], side)

        return served
    child = stack.enter_context(engine_child(engine, workload))

    def loaded() -> Mapping[str, Side]:
        child.wait_until_ready()
        if engine == "async":
            return {"async": Side(partial(child.run, "streamed"), family(child.pid))}
        return {
            "generate": Side(partial(child.run, "generate"), [child.pid]),
            "stepped": Side(partial(child.run, "stepped"), [child.pid]),
        }

    return loaded


def _yard(workload: Workload, stack: ExitStack) -> Mapping[str, Side]:
    yard = stack.enter_context(tokenyard(workload, 1))
    side = Side(yard.run, yard.pids, yard.yard.pids["broker"])
    return dict.fromkeys(OF_ENGINE["tokenyard"], side)
