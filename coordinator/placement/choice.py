"""Which devices a model is given: the cheapest that it may have, all on one host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.placement.devices import DeviceId, ModelHolder, PlacementDevice
from coordinator.placement.needs import Need, Reach
from coordinator.placement.state import PlacementState


@dataclass(frozen=True, slots=True)
class DeviceOption:
    """Devices that can be had together.

    The cost says, in this order, whether something has to give way (1) and even something that is
    wanted (2); how many workers its model has (the more the better) and how much it is wanted;
    whether the model must be loaded from its files; how many devices are given up; and when there
    last was work.
    """

    devices: Sequence[PlacementDevice]
    cost: tuple[float, ...]


class DeviceChoice:
    """Chooses devices."""

    def __init__(self, state: PlacementState) -> None:
        self._state = state

    def choose(self, need: Need) -> DeviceOption | None:
        """The cheapest devices for a model; None where there are too few to give."""
        found = [self._together(controller, ranks, need) for controller, ranks in self._hosts(need)]
        options = (option for option in found if option)
        return min(options, key=lambda option: option.cost, default=None)

    def gather(self, need: Need) -> Sequence[DeviceId]:
        """Devices to keep for a group that could not be given all that it needs.

        Those of the host where all may be had first. Given away one by one, to models that need
        only one, they would never be free to change at the same time.
        """
        sets = []
        for controller, ranks in self._hosts(need):
            first = self._first_to_change(controller, need.model)[:ranks]
            if ranks > 1 and len(first) == ranks:
                sets.append((first[-1][0], [device for _, device in first]))
        return min(sets, default=(0.0, []))[1]

    def _first_to_change(self, controller: str, model: str) -> list[tuple[float, DeviceId]]:
        """The devices of a host, those first that have kept their models longest."""
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
        """The controllers that may load a model now, and how many devices it takes there."""
        catalog = self._state.catalog
        for controller, info in catalog.fitting(need.model).items():
            if not catalog.pauses(info):
                yield controller, info.ranks

    def _together(self, controller: str, ranks: int, need: Need) -> DeviceOption | None:
        """So many devices of one host, the cheapest first."""
        chosen: list[DeviceOption] = []
        for option in sorted(self._options(controller, need), key=lambda one: one.cost):
            chosen.append(option)
            if _count(chosen) >= ranks:
                return _joined(_without_needless(chosen, ranks), ranks)
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
        what = (must_load, len(devices), holder.leader.used_ms)
        if self._state.is_idle(holder):
            return DeviceOption(devices, (1, 0, 0, *what))
        wanted = self._state.wants(holder.model) + holder.leader.load
        return DeviceOption(devices, (2, -self._state.serving[holder.model], wanted, *what))

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


def _without_needless(options: Sequence[DeviceOption], ranks: int) -> list[DeviceOption]:
    """Leave out what is not needed any more since a whole group gives way."""
    kept = list(options)
    for option in options:
        if _count(kept) - len(option.devices) >= ranks:
            kept.remove(option)
    return kept


def _joined(options: Sequence[DeviceOption], ranks: int) -> DeviceOption:
    """Several as one, which costs as much as the dearest of them."""
    devices = [device for option in options for device in option.devices]
    return DeviceOption(devices[:ranks], max(option.cost for option in options))
