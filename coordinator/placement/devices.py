"""What the devices of the yard hold, and which of them a model is given.

A device is one GPU of a host, or a share of its cores. At most one of its processes is awake and
occupies the device; the others are warm, without a model, or asleep with one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from coordinator.placement.needs import Catalog, Demand, Need, Reach, Supply
from tokenyard.protocol.control import RunState
from tokenyard.protocol.worker_info import WorkerInfo, WorkerState

DeviceId = tuple[str, int]  # controller, index on its host

#: States of a worker that occupies its device.
AWAKE: Final = frozenset[WorkerState]({"loading", "ready", "draining", "unloading", "attached"})
#: States of a worker that serves its model or is about to.
SERVING: Final = frozenset[WorkerState]({"loading", "ready"})
#: States of a worker that is about to release it.
LEAVING: Final = frozenset[WorkerState]({"draining", "unloading"})


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker with a lease."""

    worker: str  # with its incarnation
    info: WorkerInfo
    load: int = 0  # entries on its lane
    worked_ms: float = 0.0  # when it was last seen at work; 0: never
    run_state: RunState = "RUNNING"  # the desired or the actual one, whichever is stricter

    @property
    def is_running(self) -> bool:
        """Whether it may get commands; a paused worker is left as it is."""
        return self.run_state == "RUNNING"

    @property
    def device(self) -> DeviceId:
        """The device of its process."""
        return self.info.controller, self.info.device

    @property
    def used_ms(self) -> float:
        """When it was last used."""
        return max(self.worked_ms, self.info.since_ms)


@dataclass(frozen=True, slots=True)
class ModelHolder:
    """A model that occupies a device, or several as a group, while it loads, serves or leaves."""

    leader: Worker
    devices: frozenset[DeviceId]
    swapped_ms: float  # when one of them last changed its model; 0: never

    @property
    def model(self) -> str:
        """The model that it holds."""
        return self.leader.info.model

    @property
    def serves(self) -> bool:
        """Whether it serves its model or is about to."""
        return self.leader.info.state in SERVING and self.leader.is_running

    @property
    def is_ready(self) -> bool:
        """Whether requests may be given to it."""
        return self.leader.info.state == "ready" and self.leader.is_running


@dataclass(frozen=True, slots=True)
class PlacementDevice:
    """One device, and the workers on it."""

    id: DeviceId
    holder: ModelHolder | None
    workers: Sequence[Worker]

    @property
    def is_free(self) -> bool:
        """Whether no model occupies it."""
        return self.holder is None and not self._awake() and not self.is_paused

    @property
    def is_paused(self) -> bool:
        """Whether its current holder is paused, or suspended and will need it again."""
        awake = self._awake()
        if not awake:
            asleep = (one for one in self.workers if one.info.state == "asleep")
            return any(one.run_state == "SUSPENDED" for one in asleep)
        return not all(one.is_running for one in awake)

    @property
    def is_settled(self) -> bool:
        """Whether one worker occupies it, rather than one that comes and one that leaves."""
        return self.holder is not None and len(self._awake()) == 1 and not self.is_paused

    def entrance(self, model: str) -> Worker | None:
        """The worker that should get a command to load ``model`` here; None where there is none.

        The worker that occupies the device, else one asleep with that model, else one without any.
        """
        if self.is_paused:
            return None
        awake = sorted(self._awake(), key=lambda one: one.info.state == "attached")
        return next(iter(awake), None) or self.sleeper(model) or next(self._running("warm"), None)

    def sleeper(self, model: str) -> Worker | None:
        """A worker that is asleep with ``model``."""
        return next((one for one in self._running("asleep") if one.info.model == model), None)

    def _running(self, state: WorkerState) -> Iterator[Worker]:
        return (one for one in self.workers if one.info.state == state and one.is_running)

    def _awake(self) -> list[Worker]:
        return [one for one in self.workers if one.info.state in AWAKE]


def map_devices(
    workers: Iterable[Worker],
) -> tuple[Sequence[PlacementDevice], Sequence[ModelHolder]]:
    """The devices of all workers, and the models that occupy them.

    Workers that name no controller seem to share a device.
    """
    everybody = sorted(workers, key=lambda one: (one.device, one.worker))
    swapped: dict[DeviceId, float] = {}
    for one in everybody:
        swapped[one.device] = max(swapped.get(one.device, 0.0), one.info.swapped_ms)
    holders = list(_holders(everybody, swapped))
    held = {device: holder for holder in holders for device in holder.devices}
    devices = [
        PlacementDevice(device, held.get(device), list(there))
        for device, there in groupby(everybody, key=lambda one: one.device)
    ]
    return devices, holders


def _holders(workers: Sequence[Worker], swapped: dict[DeviceId, float]) -> Iterator[ModelHolder]:
    """Serving holders come last, so that a device shows them while another leaves."""
    awake = [one for one in workers if one.info.state in AWAKE]
    leaders = [one for one in awake if one.info.state != "attached"]
    named: dict[str, set[DeviceId]] = {}
    for one in workers:
        named.setdefault(one.info.name, set()).add(one.device)
    for leader in sorted(leaders, key=lambda one: one.info.state in SERVING):
        devices = {leader.device}.union(*(named.get(name, ()) for name in leader.info.group))
        swapped_ms = max(swapped[device] for device in devices)
        yield ModelHolder(leader, frozenset(devices), swapped_ms)


# Which devices a model is given: the cheapest that it may have, all on one host.

#: A model gives way once it had no requests for this part of the time that its load takes.
REST: Final = 0.5


class PlacementState:
    """The devices, models and demands of one decision, and what it has given away so far."""

    def __init__(
        self, workers: Iterable[Worker], demands: Iterable[Demand], catalog: Catalog, now_ms: float
    ) -> None:
        devices, self.holders = map_devices(workers)
        self.devices = {device.id: device for device in devices}
        self.demands = {one.model: one for one in demands if one.requests > 0}
        self.catalog = catalog
        self.now_ms = now_ms
        #: Devices that were given to a model, now or by a load that is pending.
        self.taken: set[DeviceId] = set()
        #: By model: workers that serve it, are about to, or were commanded to load it.
        self.serving = Counter(holder.model for holder in self.holders if holder.serves)

    def give(self, model: str, devices: Iterable[DeviceId]) -> None:
        """Count devices as the model's, and the models that they held as gone."""
        given = set(devices)
        for holder in self.holders:
            if holder.serves and holder.devices & given:
                self.serving[holder.model] -= 1
        self.taken |= given
        self.serving[model] += 1

    def supplies(self) -> Mapping[str, Supply]:
        """The workers that hold each model."""
        limits: Counter[str] = Counter()
        for holder in self.holders:
            if holder.is_ready:
                limit = holder.leader.info.lane_limit
                limits[holder.model] = max(limit, limits[holder.model])
        return {model: Supply(count, limits[model]) for model, count in self.serving.items()}

    def kept(self) -> Mapping[str, int]:
        """The number of devices of each controller that pinned models keep."""
        pinned = (one for one in self.holders if one.serves and self.is_pinned(one))
        return Counter(controller for holder in pinned for controller, _ in holder.devices)

    def is_paused(self, model: str) -> bool:
        """Whether a worker holds it that does not serve it only because it is paused."""
        workers = (one for device in self.devices.values() for one in device.workers)
        return any(one.info.model == model and not one.is_running for one in workers)

    def wants(self, model: str) -> int:
        """The number of requests that wait for a model."""
        demand = self.demands.get(model)
        return demand.requests if demand else 0

    def is_idle(self, holder: ModelHolder) -> bool:
        """Whether it has no requests now, running or waiting."""
        return not holder.leader.load and not self.wants(holder.model)

    def has_rested(self, holder: ModelHolder) -> bool:
        """Whether it had no requests for half as long as it takes to load it again.

        Between two bursts of requests it has none for a moment.
        """
        return self.is_idle(holder) and self._passed(holder, holder.leader.used_ms, REST)

    def is_pinned(self, holder: ModelHolder, given: int = 0) -> bool:
        """Whether its pinned model would have too few workers without it and ``given`` more."""
        pin = self.catalog.pins[holder.model]
        return pin > 0 and self.serving[holder.model] - given <= pin

    def has_swapped(self, holder: ModelHolder, model: str) -> bool:
        """Whether its devices have changed their model so recently that ``model`` has to wait."""
        info = holder.leader.info
        spent_s = sum(info.phases_s.values())
        hold_s = self.catalog.hold_s(holder.model, info.controller, model, spent_s)
        return self.now_ms - holder.swapped_ms < 1000 * hold_s

    def has_paid(self, holder: ModelHolder) -> bool:
        """Whether it has been ready for at least as long as its load took.

        The host may not have reported the very first load yet; the worker's own entry has it.
        """
        return self._passed(holder, holder.leader.info.since_ms)

    def _passed(self, holder: ModelHolder, since_ms: float, loads: float = 1.0) -> bool:
        """Whether as much time has passed as so many loads of its model take."""
        info = holder.leader.info
        load_s = self.catalog.load_s(holder.model, info.controller)
        load_s = load_s or sum(info.phases_s.values())
        return self.now_ms - since_ms >= 1000 * load_s * loads


@dataclass(frozen=True, slots=True)
class DeviceOption:
    """Devices that can be had together.

    The cost is, in this order: whether a model has to give way (1), even one with requests (2); how
    many workers that model has (the more the better) and how many requests; whether the new model
    must be loaded from its files; how many devices are given up; and when they were last used.
    """

    devices: Sequence[PlacementDevice]
    cost: tuple[float, ...]


class DeviceChoice:
    """Chooses devices for one need at a time."""

    def __init__(self, state: PlacementState) -> None:
        self._state = state

    def choose(self, need: Need) -> DeviceOption | None:
        """The cheapest devices for a model; None where there are too few to give."""
        found = [self._together(controller, ranks, need) for controller, ranks in self._hosts(need)]
        options = (option for option in found if option)
        return min(options, key=lambda option: option.cost, default=None)

    def gather(self, need: Need) -> Sequence[DeviceId]:
        """Devices to keep for a group that could not be given all that it needs.

        Those of the host that can free all of them first. Given away one by one, to models that
        need only one, they would never be free at the same time.
        """
        sets = []
        for controller, ranks in self._hosts(need):
            first = self._first_to_change(controller, need.model)[:ranks]
            if ranks > 1 and len(first) == ranks:
                sets.append((first[-1][0], [device for _, device in first]))
        return min(sets, default=(0.0, []))[1]

    def _first_to_change(self, controller: str, model: str) -> list[tuple[float, DeviceId]]:
        """The devices of a host with the time of their last swap, the longest ago first."""
        times = []
        for device in self._state.devices.values():
            holder = device.holder
            if device.id[0] != controller or (holder and self._state.is_pinned(holder)):
                continue
            swapped_ms = holder.swapped_ms if holder else 0.0
            is_away = device.id in self._state.taken or not device.entrance(model)
            times.append((math.inf if is_away else swapped_ms, device.id))
        return sorted(times)

    def _hosts(self, need: Need) -> Iterator[tuple[str, int]]:
        """The controllers that may load a model now, and the number of devices it needs there."""
        catalog = self._state.catalog
        for controller, info in catalog.fitting(need.model).items():
            if not catalog.pauses(info):
                yield controller, info.ranks

    def _together(self, controller: str, ranks: int, need: Need) -> DeviceOption | None:
        """The cheapest ``ranks`` devices of one host."""
        chosen: list[DeviceOption] = []
        given: Counter[str] = Counter()  # workers of each model that would give way together
        for option in sorted(self._options(controller, need), key=lambda one: one.cost):
            holder = option.devices[0].holder
            if option.cost[0] and holder:
                if self._state.is_pinned(holder, given[holder.model]):
                    continue
                given[holder.model] += 1
            chosen.append(option)
            if _count(chosen) >= ranks:
                return _joined(_without_surplus(chosen, ranks), ranks)
        return None

    def _options(self, controller: str, need: Need) -> Iterator[DeviceOption]:
        yield from self._free(controller, need.model)
        for holder in self._state.holders:
            if holder.leader.info.controller == controller and self._gives_way(holder, need):
                yield self._swap(holder, need.model)

    def _free(self, controller: str, model: str) -> Iterator[DeviceOption]:
        for device in self._state.devices.values():
            is_ours = device.id[0] == controller and device.id not in self._state.taken
            worker = device.entrance(model) if is_ours and device.is_free else None
            if worker:
                cost = (0, 0, 0, not device.sleeper(model), 1, worker.used_ms)
                yield DeviceOption([device], cost)

    def _swap(self, holder: ModelHolder, model: str) -> DeviceOption:
        devices = [self._state.devices[device] for device in sorted(holder.devices)]
        must_load = not any(device.sleeper(model) for device in devices)
        rest = (must_load, len(devices), holder.leader.used_ms)
        if self._state.is_idle(holder):
            return DeviceOption(devices, (1, 0, 0, *rest))
        wanted = self._state.wants(holder.model) + holder.leader.load
        return DeviceOption(devices, (2, -self._state.serving[holder.model], wanted, *rest))

    def _gives_way(self, holder: ModelHolder, need: Need) -> bool:
        """Whether a holder's devices may be given to another model now."""
        state = self._state
        if need.reach is Reach.FREE or holder.devices & state.taken:
            return False
        if not holder.is_ready or not self._is_settled(holder):
            return False
        if state.is_pinned(holder) or state.has_swapped(holder, need.model):
            return False
        if need.reach is Reach.BUSY and state.has_paid(holder):
            return True
        return state.has_rested(holder)

    def _is_settled(self, holder: ModelHolder) -> bool:
        found = [self._state.devices.get(device) for device in holder.devices]
        return all(device is not None and device.is_settled for device in found)


def _count(options: Sequence[DeviceOption]) -> int:
    return sum(len(option.devices) for option in options)


def _without_surplus(options: Sequence[DeviceOption], ranks: int) -> list[DeviceOption]:
    """Leave out options that became superfluous because a whole group gives way."""
    kept = list(options)
    for option in options:
        if _count(kept) - len(option.devices) >= ranks:
            kept.remove(option)
    return kept


def _joined(options: Sequence[DeviceOption], ranks: int) -> DeviceOption:
    """Several options as one, which costs as much as the most expensive of them."""
    devices = [device for option in options for device in option.devices]
    return DeviceOption(devices[:ranks], max(option.cost for option in options))
