"""The sides of `serving.py --shape`, one at a time: a GPU has no room for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, Literal

from benchmarks.serving_case import Workload
from benchmarks.serving_child import engine_child
from benchmarks.serving_http import http_server
from benchmarks.serving_stage import Side, family
from benchmarks.serving_yard import tokenyard

#: What is started together.
Engine = Literal["program", "async", "serve", "tokenyard"]
#: The sides of each, by the names of `serving.SIDES`; the first ones are the least to be missed.
OF_ENGINE: Final[Mapping[Engine, tuple[str, ...]]] = {
    "program": ("generate", "stepped"),
    "tokenyard": ("tokenyard", "tokenyard_stream"),
    "async": ("async",),
    "serve": ("serve", "serve_stream"),
}


@contextmanager
def alone(engine: Engine, workload: Workload) -> Iterator[Mapping[str, Side]]:
    """Start one engine, wait until it is ready, and end it."""
    if engine == "tokenyard":
        with tokenyard(workload, 1) as yard:
            side = Side(yard.run, yard.pids, yard.yard.pids["broker"])
            yield dict.fromkeys(OF_ENGINE[engine], side)
    elif engine == "serve":
        with http_server(workload) as server:
            server.wait_until_ready()
            side = Side(server.run, [os.getpid(), *family(server.pid)])
            yield dict.fromkeys(OF_ENGINE[engine], side)
    else:
        with engine_child(engine, workload) as child:
            child.wait_until_ready()
            if engine == "async":
                yield {"async": Side(partial(child.run, "streamed"), family(child.pid))}
            else:
                yield {
                    "generate": Side(partial(child.run, "generate"), [child.pid]),
                    "stepped": Side(partial(child.run, "stepped"), [child.pid]),
                }
