"""Which models need one more worker, why, and how far they may go for it; and which can have none.

Pure functions of what waits, of what the hosts may load, and of who holds what.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.dispatch.demand import Demand
from coordinator.placement.turns import ModelTurns
from tokenyard.protocol.texts import counted
from tokenyard.protocol.worker_info import HostInfo, ModelInfo

#: A model that failed so often in a row on every host is not waited for.
MOST_FAULTS: Final = 3
#: Devices are kept for a group from when it is due until it has waited for so many of the longest
#: turns: one that never comes must not keep them for ever.
MOST_GATHERING: Final = 4
#: Longest pause before a model that could not be loaded is tried again on that host.
MOST_PAUSE_S: Final = 60.0


class Reach(enum.IntEnum):
    """Which devices a model may be given."""

    FREE = 1  # those that nothing takes up
    IDLE = 2  # those of models, too, that nobody wants now
    BUSY = 3  # any, too; what runs there ends first


@dataclass(frozen=True, slots=True)
class Need:
    """A model that needs one more worker."""

    model: str
    why: str
    reach: Reach
    gathers: bool = False  # devices are kept for it until it has all that it takes


class Catalog:
    """What the hosts may load, and how that went."""

    def __init__(
        self,
        hosts: Mapping[str, HostInfo],
        *,
        now_ms: float,
        max_model_wait_s: float,
        max_swap_share: float,
    ) -> None:
        self.hosts = hosts
        self._now_ms = now_ms
        self._offers: dict[str, dict[str, ModelInfo]] = {}  # by model and controller
        self._pins: Counter[str] = Counter()
        for controller, host in sorted(hosts.items()):
            for info in host.models:
                self._offers.setdefault(info.name, {})[controller] = info
                self._pins[info.name] = max(info.pin, self._pins[info.name])
        #: How long models wait for each other.
        self.turns = ModelTurns(hosts, self._offers, fixed_s=max_model_wait_s, share=max_swap_share)

    def offers(self, model: str) -> Mapping[str, ModelInfo]:
        """The hosts that may load a model, by controller."""
        return self._offers.get(model, {})

    def fitting(self, model: str) -> Mapping[str, ModelInfo]:
        """Those of them that have devices enough for it."""
        offers = self.offers(model).items()
        return {name: info for name, info in offers if info.ranks <= self.hosts[name].devices}

    def pins(self) -> Mapping[str, int]:
        """How many workers always hold a model, for models where some do."""
        return {model: pin for model, pin in self._pins.items() if pin}

    def pin(self, model: str) -> int:
        """How many workers always hold it."""
        return self._pins[model]

    def load_s(self, model: str, controller: str = "") -> float:
        """What loading it took last, there or where it was quickest; 0 where nobody knows."""
        offers = self.offers(model)
        told = [offers[controller]] if controller in offers else list(offers.values())
        return min((info.load_s for info in told if info.load_s > 0), default=0.0)

    def pauses(self, info: ModelInfo) -> bool:
        """Whether a host has just failed to load a model, and should not try again yet."""
        pause_s = min(2.0**info.faults, MOST_PAUSE_S)
        return bool(info.faults) and self._now_ms - info.faulted_ms < 1000 * pause_s


@dataclass(frozen=True, slots=True)
class Supply:
    """Who holds a model."""

    workers: int = 0  # that serve it, or are about to
    lane_limit: int = 0  # entries that a lane of theirs takes; 0: none of them is ready yet


def needs(
    demands: Sequence[Demand], supplies: Mapping[str, Supply], catalog: Catalog
) -> list[Need]:
    """The models that need one more worker, the most urgent first."""
    waiting = sorted(demands, key=lambda one: (-one.oldest_wait_s, one.model))
    served = {model for model, supply in supplies.items() if supply.workers}
    return [
        *_pinned(supplies, catalog),
        *(_cold(one, catalog) for one in waiting if one.model not in served),
        *_grown([one for one in waiting if one.model in served], supplies, catalog),
    ]


def _pinned(supplies: Mapping[str, Supply], catalog: Catalog) -> Iterator[Need]:
    for model, pin in catalog.pins().items():
        if supplies.get(model, Supply()).workers < pin:
            yield Need(model, f"{counted(pin, 'worker')} should always hold it", Reach.IDLE)


def _cold(demand: Demand, catalog: Catalog) -> Need:
    """Requests wait for a model that nobody holds."""
    why = f"nobody holds it and {counted(demand.requests, 'request')} waited"
    why += f" up to {demand.oldest_wait_s:.1f} s"
    turns, waited_s = catalog.turns, demand.oldest_wait_s
    is_due = waited_s >= turns.wait_s(demand.model)
    reach = Reach.BUSY if is_due else Reach.IDLE
    gathers = is_due and waited_s < MOST_GATHERING * turns.longest_s
    return Need(demand.model, why, reach, gathers)


def _grown(
    waiting: Sequence[Demand], supplies: Mapping[str, Supply], catalog: Catalog
) -> Iterator[Need]:
    """A queue is longer than its workers' lanes, and so takes as long as a load or longer.

    Nobody measures how fast a model is served, so a lane is taken for what is served in that time.
    A device that holds another model is taken only where requests have waited for so long, too.
    """
    for demand in waiting:
        supply = supplies[demand.model]
        if supply.lane_limit and demand.requests > supply.workers * supply.lane_limit:
            why = f"{demand.requests} requests wait for {counted(supply.workers, 'worker')}"
            is_slow = demand.oldest_wait_s >= catalog.load_s(demand.model)
            yield Need(demand.model, why, Reach.IDLE if is_slow else Reach.FREE)


def hopeless(demand: Demand, catalog: Catalog, kept: Mapping[str, int]) -> str:
    """Why no host can load a model that nobody holds; "" where one may.

    ``kept`` counts the devices of each controller that pinned models keep. A host may be away for a
    moment, so for what only another one could do requests wait `Turns.hope_s` first.
    """
    if given_up := _given_up(demand.model, catalog):
        return given_up
    if demand.oldest_wait_s < catalog.turns.hope_s(demand.model):
        return ""
    offers, fitting = catalog.offers(demand.model), catalog.fitting(demand.model)
    if not offers:
        return "no host may load it"
    if not fitting:
        ranks = min(info.ranks for info in offers.values())
        most = max(catalog.hosts[controller].devices for controller in offers)
        return f"it takes {ranks} devices of one host, and the hosts that may load it have {most}"
    left = {name: catalog.hosts[name].devices - kept.get(name, 0) for name in fitting}
    if all(left[name] < info.ranks for name, info in fitting.items()):
        return "pinned models keep the devices of all hosts that may load it"
    return ""


def _given_up(model: str, catalog: Catalog) -> str:
    """Why every host has given it up for now; "" where one has not."""
    fitting = catalog.fitting(model)
    gone = {n: one for n, one in fitting.items() if one.faults >= MOST_FAULTS}
    if not fitting or len(gone) < len(fitting) or not all(map(catalog.pauses, gone.values())):
        return ""
    controller, last = max(gone.items(), key=lambda item: item[1].faulted_ms)
    times = counted(last.faults, "time")
    return f"it could not be loaded, {times} in a row on {controller}: {last.fault}"
