"""The metrics that `deploy/prometheus` and the board may query, and a yard that exports them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import worker.host.metrics
from coordinator.telemetry import metrics as coordinator_metrics
from gateway import metrics as gateway_metrics
from gateway.bridge import bridge
from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.servers import free_port
from tests.support.waiting import eventually
from tokenyard.protocol.wire import SamplingParams
from tokenyard.protocol.worker_info import WorkerInfo

#: Time to import vLLM and load its model, on busy cores.
LOAD_S = 300.0
#: vLLM's own metrics in all releases from 0.26 on; the controller passes on all that exist.
VLLM = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    }
)
OURS = {
    one.name: one
    for module in (coordinator_metrics, worker.host.metrics, gateway_metrics, bridge)
    for one in module.METRICS
}
#: No other may be queried.
METRICS = OURS.keys() | VLLM
_NAME = re.compile(r"\b(?:tokenyard_|vllm:)\w+")
_SELECTOR = re.compile(r"\b(?:tokenyard_|vllm:)\w+(?:\{[^}]*\})?")
#: Writes a model of one layer for vLLM.
_WRITE = """
import pathlib, sys
from worker.engines.vllm.made_up_model import write_model
write_model(pathlib.Path(sys.argv[1]))
"""


def asked_for(expression: str) -> set[str]:
    """The metrics of an expression; a histogram's series count under its own name."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in _NAME.findall(expression)}


def selectors(expression: str) -> list[str]:
    """Each series that an expression reads, with its label matchers."""
    return _SELECTOR.findall(expression)


@dataclass(frozen=True, slots=True)
class LiveYard:
    """A busy yard and its endpoints."""

    plant: Plant
    coordinator: str
    worker: str
    gateway: str


@contextmanager
def live_yard(url: str) -> Iterator[LiveYard]:
    """A coordinator, a controller with real vLLM, and a gateway, under constant load."""
    ports = free_port(), free_port(), free_port()
    http_port = free_port()
    with Plant(url) as plant:
        folder = plant.write("config.json", "{}").parent
        subprocess.run([sys.executable, "-c", _WRITE, folder], timeout=120, check=True)
        plant.coordinator(metrics_port=ports[0], policy="prefix_affinity")
        options = {"engine": "vllm", "model": folder, "model_name": "small", "max_num_seqs": 8}
        plant.worker(enforce_eager=True, start_timeout_s=LOAD_S, metrics_port=ports[1], **options)
        plant._start("gateway", {"port": http_port, "metrics_port": ports[2]})
        plant.wait_for_leader()
        eventually(lambda: ready(plant), timeout_s=LOAD_S)
        stop = threading.Event()
        load = threading.Thread(target=_ask, args=(plant, http_port, stop))
        load.start()
        try:
            yield LiveYard(plant, *(f"127.0.0.1:{port}" for port in ports))
        finally:
            stop.set()
            load.join(LOAD_S)


def ready(plant: Plant) -> list[WorkerInfo]:
    """The ready workers."""
    return [info for info in plant.roster().values() if info.state == "ready"]


def _ask(plant: Plant, http_port: int, stop: threading.Event) -> None:
    """Submit a few streams at a time until the event is set, and ask the gateway."""
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    while not stop.is_set():
        prompts = [[4 + (at + number) % 20 for at in range(24)] for number in range(4)]
        asked = [
            make_request(tokens=one, params=params, stream=True, tenant="ann") for one in prompts
        ]
        plant.push_all(asked)
        plant.results(asked, LOAD_S)
        with contextlib.suppress(OSError):  # not listening yet
            urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v1/models", timeout=30).close()
