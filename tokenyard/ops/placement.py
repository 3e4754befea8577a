"""Chooses the worker for an operator's `models load`: the one that displaces least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenyard.protocol.control import Command
from tokenyard.protocol.errors import Refused
from tokenyard.protocol.worker_info import ModelInfo
from tokenyard.yard.snapshot import WorkerView, YardView

if TYPE_CHECKING:
    from coordinator.placement.devices import PlacementDevice


def place_at(view: YardView, model: str, name: str) -> Command:
    """Load a model on the worker of this name; raises `Refused`."""
    offers = _offers(view, model)
    here = [one for one in view.living if one.info and one.info.name == name]
    if not here:
        raise Refused(f"worker {name!r} is not live now")
    worker = max(here, key=lambda one: one.lease_ms)
    _refuse_paused(worker)
    controller = worker.info.controller if worker.info else ""
    if controller not in offers:
        those = ", ".join(sorted(offers))
        raise Refused(
            f"{controller}, the host of {name}, may not load {model!r}; these may: {those}"
        )
    return Command(verb="load", worker=worker.worker, model=model)


def place_anywhere(view: YardView, model: str) -> Command:
    """Load a model on the worker that displaces least; raises `Refused`.

    It prefers a free device with a sleeping engine of the model, then any free device, then one
    whose model is idle.
    """
    from coordinator.placement.devices import Worker, map_devices

    workers = [Worker(one.worker, one.info, one.lane) for one in view.living if one.info]
    devices, _ = map_devices(workers)
    found = [
        group
        for controller, info in sorted(_offers(view, model).items())
        if len(group := sorted(_options(devices, controller, model))[: info.ranks]) == info.ranks
    ]
    if not found:
        raise Refused(
            f"no device is free or idle for {model!r}: wait, or name a worker, which finishes its"
            " running requests first"
        )
    cheapest = min(found, key=lambda group: group[-1][0])
    # The leader must not be a follower in another group.
    leader, *others = sorted(cheapest, key=lambda option: (option[3], option[1]))
    indexes = [index for _, index, *_ in (leader, *others)] if others else []
    return Command(verb="load", worker=leader[2], model=model, devices=indexes)


def _offers(view: YardView, model: str) -> dict[str, ModelInfo]:
    """What the hosts that may load a model say of it, by controller."""
    offers = {host.name: info for host in view.hosts for info in host.models if info.name == model}
    if not offers:
        raise Refused(f"no live host may load {model!r}: put it into a models file")
    return offers


def _refuse_paused(worker: WorkerView) -> None:
    info = worker.info
    if info and info.run_state != "RUNNING":
        first = "resume and unpause" if info.run_state == "SUSPENDED" else "unpause"
        raise Refused(f"{info.name} is {info.run_state}: {first} it first")


def _options(
    devices: Sequence[PlacementDevice], controller: str, model: str
) -> Iterator[tuple[int, int, str, bool]]:
    """Cost, index, worker, and whether that is a follower, for each available device."""
    for device in devices:
        holder, worker = device.holder, device.entrance(model)
        if device.id[0] != controller or worker is None or worker.info.run_state != "RUNNING":
            continue
        is_idle = holder is not None and holder.is_ready and not holder.leader.load
        if device.is_free or is_idle:
            cost = 2 * (not device.is_free) + (device.sleeper(model) is None)
            yield cost, device.id[1], worker.worker, worker.info.state == "attached"
