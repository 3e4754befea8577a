"""The model that an action is asked for, and the worker if one is named."""

from __future__ import annotations

from dataclasses import dataclass

from tokenyard.admin.scopes import known_models, known_workers
from tokenyard.admin.snapshot import YardView, read_yard
from tokenyard.board.action import ActionRefused
from tokenyard.board.yard import Parameters
from tokenyard.protocol.texts import did_you_mean
from tokenyard.protocol.yard import Yard


@dataclass(frozen=True, slots=True)
class Asked:
    """A model, and the worker if one is named, in a yard."""

    view: YardView
    model: str
    worker: str  # its name; "": none is named


def asked_for(yard: Yard, given: Parameters) -> Asked:
    """What is asked for, checked; raises `ActionRefused`."""
    view = read_yard(yard)
    scopes = view.desired_states.by_scope
    model, worker = given.text("model"), given.text("worker")
    names = known_models(view, scopes)
    if model not in names:
        raise ActionRefused(f"There is no model {model[:200]!r}{did_you_mean(model[:200], names)}.")
    if worker:
        by_incarnation = {one.worker: one.info.name for one in view.living if one.info}
        worker, workers = by_incarnation.get(worker, worker), known_workers(view, scopes)
        if worker not in workers:
            hint = did_you_mean(worker[:200], workers)
            raise ActionRefused(f"There is no worker {worker[:200]!r}{hint}.", "worker")
    return Asked(view, model, worker)
