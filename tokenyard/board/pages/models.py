"""Models: who holds each, who waits for it, and what loads of it have cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.board.page import NotFound, Parameters, numbered_page
from tokenyard.protocol.control import DesiredState, model_scope
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import counted
from tokenyard.yard.changes import recent_commands
from tokenyard.yard.models import (
    ModelView,
    WaitingRequests,
    WaitingSample,
    model_views,
    read_waiting_sample,
    why_it_waits,
)
from tokenyard.yard.snapshot import read_yard

#: Models of one page.
ROWS: Final = 50
#: Commands, hosts and workers that are shown of one model.
MOST_COMMANDS: Final = 20
MOST_HOSTS: Final = 50
MOST_WORKERS: Final = 60


@dataclass(frozen=True, slots=True)
class ModelRow:
    """What is shown of one model."""

    model: ModelView
    states: Sequence[tuple[str, int]]  # workers by state, most first
    waiting: WaitingRequests  # of the sample
    why: str  # why they wait, if no worker serves it

    @property
    def load_s(self) -> float:
        """The shortest last load on its hosts; 0: none was measured."""
        return min((o.info.load_s for o in self.model.offers if o.info.load_s), default=0.0)

    @property
    def swap_s(self) -> float:
        """The shortest last swap on its hosts; 0: none was measured."""
        return min((o.info.swap_s for o in self.model.offers if o.info.swap_s), default=0.0)

    @property
    def pin(self) -> int:
        """Workers that always hold it."""
        return max((o.info.pin for o in self.model.offers), default=0)

    @property
    def ranks(self) -> int:
        """Devices that it needs."""
        return max((o.info.ranks for o in self.model.offers), default=1)

    @property
    def adapters(self) -> Sequence[str]:
        """Names that it also serves, of all its hosts and workers."""
        of_hosts = (name for offer in self.model.offers for name in offer.info.adapters)
        of_workers = (name for one in self.model.workers.values() for name in one.adapters)
        return sorted({*of_hosts, *of_workers})

    @property
    def faults(self) -> Sequence[str]:
        """Why hosts could not load it when they last tried, the latest first."""
        infos = (offer.info for offer in self.model.offers)
        failed = sorted((one for one in infos if one.fault), key=lambda one: -one.faulted_ms)
        return [one.fault for one in failed]

    @property
    def has(self) -> frozenset[str]:
        """The states of its workers, for the buttons."""
        return frozenset(state for state, _ in self.states)


def view_models(yard: Yard, given: Parameters) -> dict[str, Any]:
    """The models whose names have a text."""
    view = read_yard(yard, counts_lanes=False)
    wanted = given.text("q").lower()
    every = model_views(view)
    found = [one for one in every if wanted in one.name.lower()]
    page = numbered_page(given, len(found), ROWS, "/models", q=given.text("q"))
    sample = read_waiting_sample(yard, view)
    return {
        "rows": [_row(one, sample) for one in found[page.first : page.end]],
        "found": len(found),
        "total": len(every),
        "query": given.text("q"),
        "sample": sample,
        "numbered": page,
        "commands": recent_commands(yard, MOST_COMMANDS),
    }


def _row(model: ModelView, sample: WaitingSample, why: str = "") -> ModelRow:
    states = Counter(one.state for one in model.workers.values())
    return ModelRow(model, states.most_common(), sample.of(model.name), why)


def view_model(yard: Yard, given: Parameters) -> dict[str, Any]:
    """One model."""
    view = read_yard(yard, counts_lanes=False)
    name = given.text("name")
    found = [one for one in model_views(view) if one.name == name]
    if not found:
        raise NotFound(f"There is no model {name[:200]!r}: no live host may load it.")
    [model] = found
    sample = read_waiting_sample(yard, view)
    commands = recent_commands(yard, MOST_COMMANDS, model=name)
    waiting = sample.of(name)
    why = why_it_waits(view, name, commands) if waiting.count else ""
    own = view.desired_states.by_scope.get(model_scope(name), DesiredState())
    row = _row(model, sample, why)
    return {
        "row": row,
        "model": model,
        "hosts": _troubled_first(model)[:MOST_HOSTS],
        "workers": list(model.workers.items())[:MOST_WORKERS],
        "sample": sample,
        "commands": commands,
        "scope": model_scope(name),
        "own": own,
        "pauses": [one.text(view.at_ms) for one in model.pauses],
        "devices": counted(row.ranks, "device"),
        "at_ms": view.at_ms,
    }


def _troubled_first(model: ModelView) -> list[Any]:
    return sorted(model.offers, key=lambda offer: (not offer.info.fault, offer.controller))
