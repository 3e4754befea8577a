"""How things stand while models are placed: what is seen, and what has been given since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from coordinator.dispatch.demand import Demand
from coordinator.placement.devices import DeviceId, DeviceMap, ModelHolder
from coordinator.placement.needs import Catalog, Supply

#: A model gives way once nobody has wanted it for this part of the time that its load takes.
REST: Final = 0.5


class PlacementState:
    """Answers what the rules ask of models, devices and their holders."""

    def __init__(
        self, map_devices: DeviceMap, demands: Iterable[Demand], catalog: Catalog, now_ms: float
    ) -> None:
        self.devices = {device.id: device for device in map_devices.devices}
        self.holders = map_devices.holders
        self.demands = {one.model: one for one in demands if one.requests > 0}
        self.catalog = catalog
        self.now_ms = now_ms
        #: Devices that have been given to a model, now or by an order that is under way.
        self.taken: set[DeviceId] = set()
        #: By model: workers that serve it, are about to, or have been ordered.
        self.serving = Counter(holder.model for holder in self.holders if holder.serves)

    def give(self, model: str, devices: Iterable[DeviceId]) -> None:
        """Count devices as the model's, and what gives way there as gone."""
        given = set(devices)
        for holder in self.holders:
            if holder.serves and holder.devices & given:
                self.serving[holder.model] -= 1
        self.taken |= given
        self.serving[model] += 1

    def supplies(self) -> Mapping[str, Supply]:
        """Who holds the models."""
        limits: Counter[str] = Counter()
        for holder in self.holders:
            if holder.is_ready:
                limit = holder.leader.info.lane_limit
                limits[holder.model] = max(limit, limits[holder.model])
        return {model: Supply(count, limits[model]) for model, count in self.serving.items()}

    def kept(self) -> Mapping[str, int]:
        """How many devices of each controller belong to pinned models, and to nobody else."""
        pinned = (one for one in self.holders if one.serves and self.is_pinned(one))
        return Counter(controller for holder in pinned for controller, _ in holder.devices)

    def is_paused(self, model: str) -> bool:
        """Whether a worker has it that would serve it, had nobody paused that worker."""
        workers = (one for device in self.devices.values() for one in device.workers)
        return any(one.info.model == model and not one.is_running for one in workers)

    def wants(self, model: str) -> int:
        """How many requests wait for a model."""
        demand = self.demands.get(model)
        return demand.requests if demand else 0

    def is_idle(self, holder: ModelHolder) -> bool:
        """Whether nobody wants it now."""
        return not holder.leader.load and not self.wants(holder.model)

    def has_rested(self, holder: ModelHolder) -> bool:
        """Whether nobody has wanted it for half as long as it takes to load it again.

        Between two bursts of requests nobody does for a moment.
        """
        return self.is_idle(holder) and self._passed(holder, holder.leader.used_ms, REST)

    def is_pinned(self, holder: ModelHolder) -> bool:
        """Whether its model would have too few workers without it; not where nobody pins it.

        Such a model may have no workers any more, if all its devices have just been given away.
        """
        pin = self.catalog.pin(holder.model)
        return pin > 0 and self.serving[holder.model] <= pin

    def has_swapped(self, holder: ModelHolder, model: str) -> bool:
        """Whether its devices have changed their model so lately that ``model`` has to wait."""
        info = holder.leader.info
        spent_s = sum(info.phases_s.values())
        hold_s = self.catalog.turns.hold_s(holder.model, info.controller, model, spent_s)
        return self.now_ms - holder.swapped_ms < 1000 * hold_s

    def has_paid(self, holder: ModelHolder) -> bool:
        """Whether it has been ready for at least as long as it was loaded.

        The first load of all, which its host may still be about to tell, stands in its own entry.
        """
        return self._passed(holder, holder.leader.info.since_ms)

    def _passed(self, holder: ModelHolder, since_ms: float, loads: float = 1.0) -> bool:
        """Whether as much time has passed as so many loads of its model take."""
        info = holder.leader.info
        load_s = self.catalog.load_s(holder.model, info.controller)
        load_s = load_s or sum(info.phases_s.values())
        return self.now_ms - since_ms >= 1000 * load_s * loads
