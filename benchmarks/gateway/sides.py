"""The sides: yards behind gateways, and vLLM's own server."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks import bridge
from benchmarks.cold_start.serve import HOST, Front, ask, free_port, served
from benchmarks.serving.case import TIMEOUT_S, Workload
from benchmarks.serving.sides import family
from benchmarks.serving.yard import tokenyard
from benchmarks.yard import STOP_S, last_lines
from tokenyard.process.children import start_child, stop_child

_POLL_S: Final = 0.02
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
        options = ["--redis-url", yard.url, "--yard", yard.name]
        began = time.monotonic()
        gateways = [stack.enter_context(running_gateway(options)) for _ in range(count)]
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


class _Gateway:
    """A gateway's process."""

    def __init__(self, options: Sequence[str], log: Path) -> None:
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        self._log = log
        command = [
            sys.executable,
            "-m",
            "gateway",
            *options,
            "--host",
            HOST,
            "--port",
            str(self._port),
        ]
        self.process = start_child(command, log)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def wait_until_ready(self, model: str) -> None:
        """Wait until it lists the model; raises `ChildProcessError` or `TimeoutError`."""
        until = time.monotonic() + TIMEOUT_S
        while not self._lists(model):
            words = last_lines(self._log.read_text(errors="replace"))
            if self.process.poll() is not None:
                raise ChildProcessError(f"the gateway has ended:\n{words}")
            if time.monotonic() > until:
                raise TimeoutError(f"the gateway does not list {model!r}:\n{words}")
            time.sleep(_POLL_S)

    def _lists(self, model: str) -> bool:
        with contextlib.suppress(OSError):
            answer = ask(self._port, "GET", "/v1/models")
            return model in {one["id"] for one in json.load(answer)["data"]}
        return False


@contextmanager
def running_gateway(options: Sequence[str]) -> Iterator[_Gateway]:
    """Run one with these options; it serves after `_Gateway.wait_until_ready`."""
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        gateway = _Gateway(options, Path(folder) / "gateway.log")
        try:
            yield gateway
        finally:
            stop_child(gateway.process, STOP_S)
