"""Short situations for the placement, and its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.placement.decide import PendingLoad, Placement, Situation, place
from coordinator.placement.devices import Worker
from coordinator.placement.needs import Demand
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo

NOW_MS = 1_000_000_000.0
WAIT_S = 30.0


def demand(model: str, requests: int = 1, wait_s: float = 0.0) -> Demand:
    """A demand of so many requests for a model, the oldest of this age."""
    return Demand(model, requests, 10 * requests, wait_s)


def worker(
    name: str,
    model: str = "",
    *,
    state: str = "",
    load: int = 0,
    idle_s: float = 1_000.0,
    since_s: float = 2_000.0,
    swapped_s: float | None = None,
    **info: Any,
) -> Worker:
    """A worker of device 0 of host `h`; ready if it has a model, else warm."""
    values: dict[str, Any] = {
        "name": name.rpartition(".")[0],
        "state": state or ("ready" if model else "warm"),
        "model": model,
        "controller": "h",
        "lane_limit": 4,
        "since_ms": int(NOW_MS - 1000 * since_s),
        "swapped_ms": 0 if swapped_s is None else int(NOW_MS - 1000 * swapped_s),
    }
    worked_ms = NOW_MS if load else NOW_MS - 1000 * idle_s
    return Worker(name, WorkerInfo(**(values | info)), load, worked_ms)


def host(name: str = "h", devices: int = 8, **models: Mapping[str, Any]) -> dict[str, HostInfo]:
    """A host that may load `a`, `b` and `c`, or the given models."""
    offers = models or {"a": {}, "b": {}, "c": {}}
    infos = [ModelInfo(name=model, **values) for model, values in offers.items()]
    return {name: HostInfo(name=name, devices=devices, models=infos)}


def decide(
    demands: Sequence[Demand],
    workers: Sequence[Worker],
    hosts: Mapping[str, HostInfo] | None = None,
    pending: Sequence[PendingLoad] = (),
    wait_s: float = WAIT_S,
) -> Placement:
    """Make one decision; by default on one host."""
    hosts = host() if hosts is None else hosts
    return place(Situation(demands, workers, hosts, NOW_MS, wait_s, pending))


def loads(placement: Placement) -> list[tuple[str, str]]:
    """The worker and model of each command."""
    assert all(command.verb == "load" and command.why for command in placement.commands)
    return [(command.worker, command.model) for command in placement.commands]
