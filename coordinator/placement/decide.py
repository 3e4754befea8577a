"""Which worker should hold which model: a pure decision over what waits and what there is.

docs/placement.md explains the rules, with examples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.placement.devices import (
    LEAVING,
    SERVING,
    DeviceChoice,
    DeviceId,
    DeviceOption,
    ModelHolder,
    PlacementDevice,
    PlacementState,
    Worker,
)
from coordinator.placement.needs import Catalog, Demand, Need, hopeless, needs
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
