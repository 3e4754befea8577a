"""Which worker an operator's `models load` is for: the one that costs the others least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tokenyard.admin.snapshot import WorkerView, YardView
from tokenyard.cli.shared.names import living
from tokenyard.protocol.worker_info import HostInfo, ModelInfo

if TYPE_CHECKING:
    from coordinator.placement.devices import PlacementDevice


class NoPlace(click.ClickException):
    """A model that cannot be loaded now; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is to be loaded."""

    worker: str  # with its incarnation
    devices: Sequence[int] = ()  # of a group, the worker's first; none: the controller chooses


def place_at(view: YardView, model: str, name: str) -> Place:
    """At the worker of this name; raises `NoPlace`."""
    offers = _offers(view, model)
    here = [one for one in living(view) if one.info and one.info.name == name]
    if not here:
        raise NoPlace(f"worker {name!r} is not there now")
    worker = max(here, key=lambda one: one.lease_ms)
    _refuse_paused(worker)
    controller = worker.info.controller if worker.info else ""
    if controller not in offers:
        those = ", ".join(sorted(offers))
        raise NoPlace(
            f"{controller}, the host of {name}, may not load {model!r}; these may: {those}"
        )
    return Place(worker.worker)


def place_anywhere(view: YardView, model: str) -> Place:
    """At the worker that costs the others least; raises `NoPlace`.

    A free device where it sleeps comes first, then a free device, then those whose models nobody
    uses now.
    """
    from coordinator.placement.devices import Worker, map_devices

    workers = [Worker(one.worker, one.info, one.lane) for one in living(view) if one.info]
    devices = map_devices(workers).devices
    found = [
        option
        for controller, (info, _) in sorted(_offers(view, model).items())
        if (option := _together(devices, controller, info.ranks, model))
    ]
    if not found:
        raise NoPlace(
            f"no device is free for {model!r}, or idle: name a worker with --worker, and what runs"
            " there may finish first; or wait"
        )
    return min(found, key=lambda option: option[0])[1]


def _offers(view: YardView, model: str) -> dict[str, tuple[ModelInfo, HostInfo]]:
    """The hosts that may load it, by controller."""
    offers = {
        host.name: (info, host) for host in view.hosts for info in host.models if info.name == model
    }
    if not offers:
        raise NoPlace(f"no host that is there may load {model!r}: put it into a models file")
    return offers


def _refuse_paused(worker: WorkerView) -> None:
    info = worker.info
    if info and info.run_state != "RUNNING":
        first = "resume and unpause" if info.run_state == "SUSPENDED" else "unpause"
        raise NoPlace(f"{info.name} is {info.run_state}: {first} it first")


def _together(
    devices: Sequence[PlacementDevice], controller: str, ranks: int, model: str
) -> tuple[int, Place] | None:
    """The cheapest devices of one host, and what the dearest of them costs."""
    options = sorted(_options(devices, controller, model), key=lambda option: option[:2])[:ranks]
    if len(options) < ranks:
        return None
    # One whose worker is no mere follower of a group leads.
    options.sort(key=lambda option: (option[3], option[1]))
    place = Place(options[0][2], [index for _, index, *_ in options] if ranks > 1 else ())
    return max(cost for cost, *_ in options), place


def _options(
    devices: Sequence[PlacementDevice], controller: str, model: str
) -> Iterator[tuple[int, int, str, bool]]:
    """Cost, device, worker and whether that follows, for each device that may be had."""
    for device in devices:
        holder, worker = device.holder, device.entrance(model)
        if device.id[0] != controller or worker is None or worker.info.run_state != "RUNNING":
            continue
        is_idle = holder is not None and holder.is_ready and not holder.leader.load
        if device.is_free or is_idle:
            cost = 2 * (not device.is_free) + (device.sleeper(model) is None)
            yield cost, device.id[1], worker.worker, worker.info.state == "attached"
