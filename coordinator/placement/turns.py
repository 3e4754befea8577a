"""How long a model keeps a device that others wait for, and how long they wait for it.

Pure functions of the settings and of what swaps have cost on each host. A device that serves for
``cost / share`` between two swaps loses at most that share of its time to them. docs/placement.md
explains the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from tokenyard.protocol.worker_info import HostInfo, ModelInfo

#: Shortest turn: the work around a swap, such as joining the yard again, is not measured.
LEAST_S: Final = 1.0
#: Longest turn that is derived from a cost; `max_model_wait_s` may set a longer one.
MOST_S: Final = 300.0
#: Turn of a model while the cost of a swap is unknown.
UNMEASURED_S: Final = 30.0

Offers = Mapping[str, Mapping[str, ModelInfo]]  # by model and controller


def turn_s(cost_s: float, share: float) -> float:
    """Seconds between two swaps that each cost so much and may take that share of a device."""
    return min(max(cost_s / share, LEAST_S), MOST_S)


def cost_s(info: ModelInfo) -> float:
    """What a swap of this model costs on its host; 0 while that is unknown."""
    return info.swap_s or info.load_s


class ModelTurns:
    """The turns of all models."""

    def __init__(
        self,
        hosts: Mapping[str, HostInfo],
        offers: Offers,
        *,
        fixed_s: float,
        share: float,
        gone: Sequence[HostInfo] = (),
    ) -> None:
        """``fixed_s`` is the turn of models without a setting of their own; 0: by their costs."""
        self._gone = {model.name: model for host in gone for model in host.models}
        self._hosts = hosts
        self._offers = offers
        self._fixed_s = fixed_s
        self._share = share
        self._waits: dict[str, float] = {}

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
    def longest_s(self) -> float:
        """The longest turn of all."""
        return max(map(self.wait_s, self._offers), default=UNMEASURED_S)

    def _set_s(self, model: str) -> float:
        """The turn that operators have set; 0 where there is none."""
        waits = (info.max_model_wait_s for info in self._offers.get(model, {}).values())
        return min((one for one in waits if one > 0), default=self._fixed_s)

    def _own_s(self, model: str, controller: str, spent_s: float) -> float:
        if set_s := self._set_s(model):
            return set_s
        info = self._offers.get(model, {}).get(controller)
        cost = (cost_s(info) if info else 0.0) or spent_s
        return turn_s(cost, self._share) if cost else self.wait_s(model)

    def _derived_s(self, model: str) -> float:
        """By the lowest cost of all hosts; while unknown, by the most expensive model on them."""
        offers = self._offers.get(model, {})
        if known := _known(offers.values()):
            return turn_s(min(known), self._share)
        beside = (info for controller in offers for info in self._hosts[controller].models)
        costs = _known(beside)
        return min(turn_s(max(costs), self._share), UNMEASURED_S) if costs else UNMEASURED_S


def _known(infos: Iterable[ModelInfo]) -> list[float]:
    return [cost for cost in map(cost_s, infos) if cost > 0]
