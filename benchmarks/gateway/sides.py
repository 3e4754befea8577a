"""The sides: yards behind gateways, and vLLM's own server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks import bridge
from benchmarks.cold_start.serve import HOST, Front, served
from benchmarks.serving.case import Workload
from benchmarks.serving.sides import family
from benchmarks.serving.yard import tokenyard

#: Programs before an engine or a queue.
_DOORS: Final = ("gateway", "api", "front", "bridge")


@dataclass(frozen=True, slots=True)
class Side:
    """Where to ask, and the processes of the server, by program."""

    urls: Sequence[str]
    pids: Mapping[str, Sequence[int]]
    start_s: float

    @property
    def door_mib(self) -> float:
        """Resident memory of what takes its requests."""
        pids = [pid for name in _DOORS for pid in self.pids.get(name, ())]
        return float(sum(psutil.Process(pid).memory_info().rss for pid in pids)) / 2**20


@contextmanager
def yard_side(workload: Workload, count: int) -> Iterator[Side]:
    """A yard with so many workers, and as many gateways."""
    with ExitStack() as stack:
        yard = stack.enter_context(tokenyard(workload, count)).yard
        words = ["gateway", "--redis-url", yard.url, "--yard", yard.name]
        began = time.monotonic()
        gateways = [stack.enter_context(bridge.running_door(words)) for _ in range(count)]
        for one in gateways:
            one.wait_until_ready(workload.model.name)
        start_s = time.monotonic() - began
        servers = {name: pids for name, pids in yard.pids.items() if name != "client"}
        pids = {**servers, "gateway": [one.pid for one in gateways]}
        yield Side([one.url for one in gateways], pids, start_s)


@contextmanager
def serve_side(workload: Workload, front: Front = "vllm") -> Iterator[Side]:
    """The server of vLLM: a process for its API, and the processes of its engine."""
    began = time.monotonic()
    with served(workload.model, front) as server:
        server.wait_until_healthy()
        start_s = time.monotonic() - began
        api, *engine = family(server.pid)
        pids = {"api": [api], "engine": engine}
        yield Side([f"http://{HOST}:{server.port}"], pids, start_s)


@contextmanager
def bridge_side(workload: Workload) -> Iterator[Side]:
    """A yard with one worker, and the Rust front end with a bridge before it."""
    model = workload.model
    with (
        tokenyard(workload, 1) as run,
        bridge.side("vllm-rs", run.yard.url, run.yard.name, Path(model.path), model.name) as door,
    ):
        servers = {name: pids for name, pids in run.yard.pids.items() if name != "client"}
        yield Side([door.url], {**servers, **door.pids}, door.start_s)
