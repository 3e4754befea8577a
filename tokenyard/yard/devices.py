"""The devices of a yard: which worker occupies each, what else is there, and what changes.

Pure functions of the workers of a roster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tokenyard.protocol.worker_info import HostInfo, WorkerInfo
from tokenyard.yard.snapshot import SeenState, WorkerView

#: Of several workers of a device, the first in this order is the one that it is shown with.
_ORDER: Final[tuple[SeenState, ...]] = (
    "ready",
    "loading",
    "draining",
    "unloading",
    "attached",
    "asleep",
    "warming",
    "failed",
    "warm",
    "unreadable",
    "lost",
    "left",
)
#: What a worker does in a state that does not last.
_DOING: Final[Mapping[SeenState, str]] = {
    "warming": "warms up",
    "loading": "loads",
    "draining": "finishes its requests",
    "unloading": "releases its device",
}


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device of a host, or several that hold one model together."""

    controller: str  # of its host; "" for a worker without one
    indexes: Sequence[int]  # on its host, those of a group in the order of its ranks
    worker: WorkerView  # that occupies it, else the one that is most of interest
    others: Sequence[WorkerView] = ()  # further workers of these devices
    members: Sequence[str] = ()  # names of a group, its leader's first

    @property
    def info(self) -> WorkerInfo | None:
        """The worker's roster entry, if it is readable."""
        return self.worker.info

    @property
    def name(self) -> str:
        """The worker's name without its incarnation."""
        info = self.worker.info
        return info.name if info else self.worker.worker.rpartition(".")[0] or self.worker.worker

    @property
    def host(self) -> str:
        """The name of its host."""
        return self.info.host if self.info else ""

    @property
    def model(self) -> str:
        """The model that it holds, sleeps with, or loads; "" for none."""
        return self.info.model if self.info else ""

    @property
    def running(self) -> int:
        """Places of its engine that are taken; the rest of its lane waits."""
        return min(self.worker.lane, self.info.max_num_seqs) if self.info else 0


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of state that is under way."""

    doing: str  # "loads"
    for_ms: int  # since it began
    usual_s: float = 0.0  # how long the last one of this model took there; 0: not measured


def device_views(workers: Iterable[WorkerView]) -> list[DeviceView]:
    """The devices by host and index, each group of devices once.

    Workers that are gone are shown only on devices that have no other. One that names no controller
    has a device of its own.
    """
    places: defaultdict[tuple[str, int, str], list[WorkerView]] = defaultdict(list)
    for one in workers:
        controller, index = (one.info.controller, one.info.device) if one.info else ("", 0)
        places[controller, index, "" if controller else one.worker].append(one)
    views = [_device(*place[:2], there) for place, there in places.items()]
    return sorted(_grouped(views), key=lambda one: (one.controller, min(one.indexes), one.name))


def state_change(
    view: DeviceView, loads_s: Mapping[tuple[str, str], float], now_ms: int
) -> StateChange | None:
    """The change under way; None if the state may last. ``loads_s`` is from `load_times`."""
    info, state = view.info, view.worker.state
    if info is None or state not in _DOING:
        return None
    is_waking = state == "loading" and bool(info.engine_version)
    doing = "wakes" if is_waking else _DOING[state]
    usual_s = 0.0
    if state == "loading" and not is_waking:
        usual_s = loads_s.get((view.controller, info.model), 0.0)
    return StateChange(doing, max(0, now_ms - info.since_ms), usual_s)


def load_times(hosts: Iterable[HostInfo]) -> dict[tuple[str, str], float]:
    """The last measured time of a load, s, by controller and model."""
    return {(host.name, info.name): info.load_s for host in hosts for info in host.models}


def seen_from(views: Iterable[DeviceView], worker: WorkerView) -> DeviceView:
    """The device of a worker, with that worker in the place of the one that occupies it."""
    for one in views:
        if one.worker.worker == worker.worker:
            return one
        if worker.worker in {other.worker for other in one.others}:
            others = [each for each in one.others if each.worker != worker.worker]
            return _alone(worker, [one.worker, *others])
    return _alone(worker)


def _alone(worker: WorkerView, others: Sequence[WorkerView] = ()) -> DeviceView:
    info = worker.info
    controller, index = (info.controller, info.device) if info else ("", 0)
    return DeviceView(controller, [index], worker, others)


def _device(controller: str, index: int, workers: Iterable[WorkerView]) -> DeviceView:
    ordered = sorted(workers, key=_rank)
    first, others = ordered[0], [one for one in ordered[1:] if one.state not in {"lost", "left"}]
    members = first.info.group if first.info and first.state != "attached" else ()
    return DeviceView(controller, [index], first, others, members)


def _rank(worker: WorkerView) -> tuple[int, int]:
    return _ORDER.index(worker.state), -worker.lease_ms


def _grouped(views: Sequence[DeviceView]) -> Iterable[DeviceView]:
    """With the devices of followers as a part of their leader's."""
    leaders = {(one.controller, name): one.name for one in views for name in one.members}
    found: dict[tuple[str, str], DeviceView] = {}
    followers: list[DeviceView] = []
    for one in views:
        if one.worker.state == "attached" and (one.controller, one.name) in leaders:
            followers.append(one)
        else:
            found[one.controller, one.worker.worker] = one
    by_name = {(one.controller, one.name): key for key, one in found.items() if one.members}
    for one in sorted(followers, key=lambda each: each.indexes[0]):
        key = by_name[one.controller, leaders[one.controller, one.name]]
        leader = found[key]
        found[key] = replace(
            leader,
            indexes=[*leader.indexes, *one.indexes],
            others=[*leader.others, one.worker, *one.others],
        )
    return found.values()
