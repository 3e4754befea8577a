"""Which models need one more worker, why, and which devices they may take; and which can have none.

Pure functions of the demand, of what the hosts may load, and of the workers that hold the models.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tokenyard.protocol.texts import counted
from tokenyard.protocol.worker_info import HostInfo, ModelInfo

#: Requests do not wait for a model that failed to load so often in a row on every host.
MOST_FAULTS: Final = 3
#: A group that is due keeps devices until it has waited for so many of the longest turns: one that
#: never gets all of them must not keep them for ever.
MOST_GATHERING: Final = 4
#: Longest pause before a host tries again to load a model that failed there.
MOST_PAUSE_S: Final = 60.0
#: Shortest turn: the work around a swap, such as joining the yard again, is not measured.
LEAST_S: Final = 1.0
#: Longest turn that is derived from a cost; `max_model_wait_s` may set a longer one.
MOST_S: Final = 300.0
#: Turn of a model while the cost of a swap is unknown.
UNMEASURED_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests for one model (its adapters' included) that wait in the intake, as far as known."""

    model: str
    requests: int
    tokens: int  # of their prompts, estimated where a prompt is text
    oldest_wait_s: float  # since the oldest came in


class Reach(enum.IntEnum):
    """Which devices a model may be given."""

    FREE = 1  # those without a model
    IDLE = 2  # also those of models without requests
    BUSY = 3  # all; what runs there ends first


@dataclass(frozen=True, slots=True)
class Need:
    """A model that needs one more worker."""

    model: str
    why: str
    reach: Reach
    gathers: bool = False  # devices are kept for it until it has all that it needs


def turn_s(cost_s: float, share: float) -> float:
    """Seconds between two swaps that each cost so much and may take that share of a device."""
    return min(max(cost_s / share, LEAST_S), MOST_S)


def cost_s(info: ModelInfo) -> float:
    """What a swap of this model costs on its host; 0 while that is unknown."""
    return info.swap_s or info.load_s


class Catalog:
    """What the hosts may load, the results of earlier loads, and the turns that follow from these.

    A turn is how long a model keeps a device that others wait for. One that serves for
    ``cost / share`` between two swaps loses at most that share of its time to them.
    docs/placement.md explains the rules.
    """

    def __init__(
        self,
        hosts: Mapping[str, HostInfo],
        *,
        now_ms: float,
        max_model_wait_s: float,
        max_swap_share: float,
        gone: Sequence[HostInfo] = (),
    ) -> None:
        """``max_model_wait_s`` is the turn of models without a setting; 0: by their costs."""
        self.hosts = hosts
        self._now_ms = now_ms
        self._gone = {model.name: model for host in gone for model in host.models}
        self._fixed_s = max_model_wait_s
        self._share = max_swap_share
        self._waits: dict[str, float] = {}
        self._offers: dict[str, dict[str, ModelInfo]] = {}  # by model and controller
        #: The number of workers that always hold each model.
        self.pins: Counter[str] = Counter()
        for controller, host in sorted(hosts.items()):
            for info in host.models:
                self._offers.setdefault(info.name, {})[controller] = info
                self.pins[info.name] = max(info.pin, self.pins[info.name])

    def offers(self, model: str) -> Mapping[str, ModelInfo]:
        """The hosts that may load a model, by controller."""
        return self._offers.get(model, {})

    def fitting(self, model: str) -> Mapping[str, ModelInfo]:
        """The hosts among them that have enough devices for it."""
        offers = self.offers(model).items()
        return {name: info for name, info in offers if info.ranks <= self.hosts[name].devices}

    def load_s(self, model: str, controller: str = "") -> float:
        """How long its last load took, there or on the quickest host; 0 where that is unknown."""
        offers = self.offers(model)
        infos = [offers[controller]] if controller in offers else list(offers.values())
        return min((info.load_s for info in infos if info.load_s > 0), default=0.0)

    def pauses(self, info: ModelInfo) -> bool:
        """Whether a host failed to load a model so recently that it should not try again yet."""
        pause_s = min(2.0**info.faults, MOST_PAUSE_S)
        return bool(info.faults) and self._now_ms - info.faulted_ms < 1000 * pause_s

    # Turns

    def wait_s(self, model: str) -> float:
        """Longest wait for a device that serves another model."""
        if model not in self._waits:
            self._waits[model] = self._set_s(model) or self._derived_s(model)
        return self._waits[model]

    def hold_s(self, model: str, controller: str, newcomer: str, spent_s: float) -> float:
        """How long a model keeps a device of ``controller`` against ``newcomer``.

        A newcomer with a set wait never waits longer than that. ``spent_s`` is what the load of the
        model took, for a host that has not reported it yet.
        """
        return min(self._set_s(newcomer) or math.inf, self._own_s(model, controller, spent_s))

    def hope_s(self, model: str) -> float:
        """How long requests wait for an absent host that may load their model.

        One that is known to have been there may be started for them, however long that takes.
        """
        if gone := self._gone.get(model):
            return gone.max_model_wait_s or self._fixed_s or math.inf
        return self._set_s(model) or UNMEASURED_S

    @cached_property
    def longest_wait_s(self) -> float:
        """The longest wait of all."""
        return max(map(self.wait_s, self._offers), default=UNMEASURED_S)

    def _set_s(self, model: str) -> float:
        """The turn that operators have set; 0 where there is none."""
        waits = (info.max_model_wait_s for info in self.offers(model).values())
        return min((one for one in waits if one > 0), default=self._fixed_s)

    def _own_s(self, model: str, controller: str, spent_s: float) -> float:
        if set_s := self._set_s(model):
            return set_s
        info = self.offers(model).get(controller)
        cost = (cost_s(info) if info else 0.0) or spent_s
        return turn_s(cost, self._share) if cost else self.wait_s(model)

    def _derived_s(self, model: str) -> float:
        """By the lowest cost of all hosts; while unknown, by the most expensive model on them."""
        offers = self.offers(model)
        if known := _known(offers.values()):
            return turn_s(min(known), self._share)
        beside = (info for controller in offers for info in self.hosts[controller].models)
        costs = _known(beside)
        return min(turn_s(max(costs), self._share), UNMEASURED_S) if costs else UNMEASURED_S


@dataclass(frozen=True, slots=True)
class Supply:
    """The workers that hold a model."""

    workers: int = 0  # that serve it or are about to
    lane_limit: int = 0  # entries that a lane of theirs takes; 0: none of them is ready yet


def needs(
    demands: Sequence[Demand], supplies: Mapping[str, Supply], catalog: Catalog
) -> list[Need]:
    """The models that need one more worker, the most urgent first."""
    waiting = sorted(demands, key=lambda one: (-one.oldest_wait_s, one.model))
    served = {model for model, supply in supplies.items() if supply.workers}
    return [
        *_pinned_needs(supplies, catalog),
        *(_cold(one, catalog) for one in waiting if one.model not in served),
        *_grown([one for one in waiting if one.model in served], supplies, catalog),
    ]


def _pinned_needs(supplies: Mapping[str, Supply], catalog: Catalog) -> Iterator[Need]:
    for model, pin in catalog.pins.items():
        if supplies.get(model, Supply()).workers < pin:
            yield Need(model, f"{counted(pin, 'worker')} should always hold it", Reach.IDLE)


def _cold(demand: Demand, catalog: Catalog) -> Need:
    """Requests wait for a model that no worker holds."""
    why = f"no worker holds it and {counted(demand.requests, 'request')} waited"
    why += f" up to {demand.oldest_wait_s:.1f} s"
    waited_s = demand.oldest_wait_s
    is_due = waited_s >= catalog.wait_s(demand.model)
    reach = Reach.BUSY if is_due else Reach.IDLE
    gathers = is_due and waited_s < MOST_GATHERING * catalog.longest_wait_s
    return Need(demand.model, why, reach, gathers)


def _grown(
    waiting: Sequence[Demand], supplies: Mapping[str, Supply], catalog: Catalog
) -> Iterator[Need]:
    """A queue is longer than its workers' lanes, and so takes as long as a load or longer.

    The rate at which a model is served is not measured; a full lane is assumed to take as long as a
    load. A device with another model is taken only where requests have waited for that long, too.
    """
    for demand in waiting:
        supply = supplies[demand.model]
        if supply.lane_limit and demand.requests > supply.workers * supply.lane_limit:
            why = f"{demand.requests} requests wait for {counted(supply.workers, 'worker')}"
            is_slow = demand.oldest_wait_s >= catalog.load_s(demand.model)
            yield Need(demand.model, why, Reach.IDLE if is_slow else Reach.FREE)


def hopeless(demand: Demand, catalog: Catalog, kept: Mapping[str, int]) -> str:
    """Why no host can load a model that no worker holds; "" where one may.

    ``kept`` counts the devices of each controller that pinned models keep. A host may be away for a
    moment, so requests that only another host could serve wait `Catalog.hope_s` first.
    """
    if given_up := _given_up(demand.model, catalog):
        return given_up
    if demand.oldest_wait_s < catalog.hope_s(demand.model):
        return ""
    offers, fitting = catalog.offers(demand.model), catalog.fitting(demand.model)
    if not offers:
        return "no host that is there may load it"
    if not fitting:
        ranks = min(info.ranks for info in offers.values())
        most = max(catalog.hosts[controller].devices for controller in offers)
        return f"it takes {ranks} devices of one host, and the hosts that may load it have {most}"
    left = {name: catalog.hosts[name].devices - kept.get(name, 0) for name in fitting}
    if all(left[name] < info.ranks for name, info in fitting.items()):
        return "pinned models keep the devices of all hosts that may load it"
    return ""


def _given_up(model: str, catalog: Catalog) -> str:
    """Why every host has stopped trying for now; "" where one has not."""
    fitting = catalog.fitting(model)
    failed = {n: one for n, one in fitting.items() if one.faults >= MOST_FAULTS}
    if not fitting or len(failed) < len(fitting) or not all(map(catalog.pauses, failed.values())):
        return ""
    controller, last = max(failed.items(), key=lambda item: item[1].faulted_ms)
    times = counted(last.faults, "time")
    return f"it could not be loaded, {times} in a row on {controller}: {last.fault}"


def _known(infos: Iterable[ModelInfo]) -> list[float]:
    return [cost for cost in map(cost_s, infos) if cost > 0]
