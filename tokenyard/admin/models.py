"""The models of a yard: where they may be loaded, which workers hold them, what operators want.

Pure functions of a `YardView`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tokenyard.admin.pauses import Pause, all_pauses
from tokenyard.admin.scopes import known_models
from tokenyard.admin.snapshot import YardView
from tokenyard.protocol.control import ALL, DesiredState, DesiredStates, model_scope
from tokenyard.protocol.worker_info import ModelInfo, WorkerInfo


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """A host that may load a model."""

    controller: str
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class WorkerOfModel:
    """A worker that holds a model."""

    worker: str  # with its incarnation
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model of the yard, at one moment."""

    name: str
    hosts: list[ModelOffer]
    gone: list[ModelOffer]  # hosts that are not there now, where no other may load it
    workers: list[WorkerOfModel]
    desired_state: DesiredState  # of all and of this model
    pauses: list[Pause]  # of all and of this model

    @property
    def offers(self) -> list[ModelOffer]:
        """What hosts say of it; where none is there, the last that was."""
        return self.hosts or self.gone


def model_views(view: YardView, desired_states: DesiredStates) -> list[ModelView]:
    """Every known model, by name."""
    offers: defaultdict[str, list[ModelOffer]] = defaultdict(list)
    for host in view.hosts:
        for info in host.models:
            offers[info.name].append(ModelOffer(host.name, info))
    gone = {info.name: ModelOffer(host.name, info) for host in view.gone for info in host.models}
    workers: defaultdict[str, list[WorkerOfModel]] = defaultdict(list)
    for one in view.living:
        if one.info:
            workers[one.info.model].append(WorkerOfModel(one.worker, one.info))
    pauses = all_pauses(desired_states)
    return [
        ModelView(
            name=name,
            hosts=offers[name],
            gone=[gone[name]] if name in gone else [],
            workers=workers[name],
            desired_state=desired_states.of("", name),
            pauses=[one for one in pauses if one.scope in {ALL, model_scope(name)}],
        )
        for name in known_models(view, desired_states.by_scope)
    ]
