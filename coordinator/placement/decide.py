"""Which worker should hold which model: a pure decision over what waits and what there is.

docs/placement.md explains the rules, with examples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.placement.devices import (
    LEAVING,
    SERVING,
    DeviceId,
    ModelHolder,
    PlacementDevice,
    Worker,
    map_devices,
)
from coordinator.placement.needs import Catalog, Demand, Need, Reach, Supply, hopeless, needs
from tokenyard.protocol.control import Command
from tokenyard.protocol.worker_info import HostInfo

#: A command counts as failed when the roster shows no effect for so long, plus three times the
#: duration of the last load.
PATIENCE_S: Final = 60.0
#: The same where its worker is gone, as it is between two incarnations.
PATIENCE_GONE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load command that was sent, until the roster shows its effect."""

    command: Command
    devices: Sequence[DeviceId]  # the worker's first
    sent_ms: float
    faulted_ms: float = 0.0  # when that host had last failed to load the model, as of then


@dataclass(frozen=True, slots=True)
class Situation:
    """All inputs of the decision.

    Times are unix ms by the server's clock, or by the host's in what a host reports: they should
    agree to about a second.
    """

    demands: Sequence[Demand]  # of models that are not paused
    workers: Sequence[Worker]  # with a lease
    hosts: Mapping[str, HostInfo]  # by controller
    now_ms: float
    max_model_wait_s: float  # where a model has none of its own; 0: by what swaps cost
    pending: Sequence[PendingLoad] = ()  # of earlier decisions
    paused: Collection[str] = ()  # models that operators have paused
    max_swap_share: float = 0.1  # of a device's time, where the cost of swaps decides
    gone: Sequence[HostInfo] = ()  # with the models that only they have announced


@dataclass(slots=True)
class Placement:
    """What to do, and what to remember for the next decision."""

    commands: list[Command] = field(default_factory=list)
    pending: list[PendingLoad] = field(default_factory=list)  # the new ones included
    hopeless: dict[str, str] = field(default_factory=dict)  # models that no host can load, and why


def place(situation: Situation) -> Placement:
    """Decide once: at most one command for each model, and for each device."""
    return _Decision(situation).make()


class _Decision:
    def __init__(self, situation: Situation) -> None:
        now_ms = situation.now_ms
        self._catalog = Catalog(
            situation.hosts,
            now_ms=now_ms,
            max_model_wait_s=situation.max_model_wait_s,
            max_swap_share=situation.max_swap_share,
            gone=situation.gone,
        )
        self._state = PlacementState(situation.workers, situation.demands, self._catalog, now_ms)
        self._choice = DeviceChoice(self._state)
        self._paused = situation.paused
        self._workers = {one.worker for one in situation.workers}
        self._placement = Placement()
        for pending in situation.pending:
            if self._is_pending(pending):
                self._note(pending)

    def make(self) -> Placement:
        """Give each model that needs it one more worker, as far as there are devices."""
        state = self._state
        for need in needs(list(state.demands.values()), state.supplies(), self._catalog):
            ordered = {command.model for command in self._placement.commands}
            if need.model in ordered or need.model in self._paused:
                continue
            option = self._choice.choose(need)
            if option:
                self._give(need, option)
            elif need.gathers:
                state.taken.update(self._choice.gather(need))
        self._placement.hopeless = dict(self._hopeless())
        return self._placement

    def _note(self, pending: PendingLoad) -> None:
        self._placement.pending.append(pending)
        self._state.give(pending.command.model, pending.devices)

    def _hopeless(self) -> Iterator[tuple[str, str]]:
        """Models with requests that no host can load; none while there is no host at all."""
        kept = self._state.kept()
        for model, demand in self._state.demands.items():
            is_held = self._state.serving[model] or self._state.is_paused(model)
            if self._catalog.hosts and not is_held:
                reason = hopeless(demand, self._catalog, kept)
                if reason:
                    yield model, reason

    # Loads of earlier decisions

    def _is_pending(self, pending: PendingLoad) -> bool:
        """Whether the roster may still come to show the effect of a command."""
        controller, _ = pending.devices[0]
        info = self._catalog.offers(pending.command.model).get(controller)
        if info is None or info.faulted_ms > pending.faulted_ms or self._has_arrived(pending):
            return False
        if self._gives_way(pending):
            return True
        patience_s = 3 * info.load_s + PATIENCE_S
        if pending.command.worker not in self._workers:
            patience_s = PATIENCE_GONE_S
        return self._state.now_ms - pending.sent_ms < 1000 * patience_s

    def _has_arrived(self, pending: PendingLoad) -> bool:
        device = self._state.devices.get(pending.devices[0])
        holder = device.holder if device else None
        if holder is None or holder.model != pending.command.model:
            return False
        return holder.leader.info.state in SERVING  # paused or not

    def _gives_way(self, pending: PendingLoad) -> bool:
        """Whether the previous model is still leaving, which takes as long as its requests."""
        devices = [self._state.devices.get(device) for device in pending.devices]
        workers = (one for device in devices if device for one in device.workers)
        return any(one.info.state in LEAVING for one in workers)

    # The command

    def _give(self, need: Need, option: DeviceOption) -> None:
        devices = _leader_first(option.devices, need.model)
        worker = devices[0].entrance(need.model)
        if worker is None:
            return
        ids = [device.id for device in devices]
        command = Command(
            verb="load",
            worker=worker.worker,
            model=need.model,
            devices=[index for _, index in ids] if len(ids) > 1 else [],
            why=f"{need.why}; {self._room_made(option, need.model)}",
        )
        faulted_ms = self._catalog.offers(need.model)[ids[0][0]].faulted_ms
        self._placement.commands.append(command)
        self._note(PendingLoad(command, ids, self._state.now_ms, faulted_ms))

    def _room_made(self, option: DeviceOption, model: str) -> str:
        """Where the devices come from, in words."""
        holders = {
            device.holder.leader.worker: device.holder for device in option.devices if device.holder
        }
        parts = [self._eviction_reason(holder) for holder in holders.values()]
        if any(device.sleeper(model) for device in option.devices):
            parts.append("it sleeps there")
        return ", ".join(parts) or "a device is free"

    def _eviction_reason(self, holder: ModelHolder) -> str:
        if self._state.is_idle(holder):
            idle_s = (self._state.now_ms - holder.leader.used_ms) / 1000
            return f"{holder.model} has had no work for {idle_s:.0f} s"
        return f"{holder.model} has had its turn"


def _leader_first(devices: Sequence[PlacementDevice], model: str) -> list[PlacementDevice]:
    """In index order, devices whose worker follows in no group first."""

    def order(device: PlacementDevice) -> tuple[bool, DeviceId]:
        worker = device.entrance(model)
        return worker is None or worker.info.state == "attached", device.id

    return sorted(devices, key=order)


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
        pin = self.catalog.pin(holder.model)
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
