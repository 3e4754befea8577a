"""What the devices of the yard hold, as the placement of models sees it.

A device is one GPU of a host, or a share of its cores. At most one of its processes is awake and
occupies the device; the others are warm, without a model, or asleep with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

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
