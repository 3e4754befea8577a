"""The scopes of signals in a yard: the models and workers that it knows, and who is in them.

No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenyard.admin.pauses import Pause, all_pauses
from tokenyard.admin.snapshot import RosterView, WorkerView, YardView
from tokenyard.protocol.control import ALL, DesiredState, DesiredStates, model_scope, worker_scope
from tokenyard.protocol.worker_info import WorkerInfo


def known_models(
    view: YardView | RosterView, desired_states: Mapping[str, DesiredState]
) -> list[str]:
    """Models that a host may load or might, a worker holds, or a desired state names."""
    names = {model.name for host in (*view.hosts, *view.gone) for model in host.models}
    names |= {info.model for info in _living(view.workers) if info.model}
    return sorted(names | _scoped(desired_states, model_scope("")))


def known_workers(
    view: YardView | RosterView, desired_states: Mapping[str, DesiredState]
) -> list[str]:
    """Names of the workers that live, or that a desired state names."""
    names = {info.name for info in _living(view.workers)}
    return sorted(names | _scoped(desired_states, worker_scope("")))


def scopes_of(info: WorkerInfo) -> set[str]:
    """The scopes that a worker is in."""
    models = {model_scope(info.model)} if info.model else set()
    return {ALL, worker_scope(info.name), *models}


def other_pauses(
    workers: Iterable[WorkerView], desired_states: DesiredStates, scope: str
) -> list[Pause]:
    """The pauses of other scopes that hold workers of this one."""
    related = {ALL}
    for info in _living(workers):
        scopes = scopes_of(info)
        related |= scopes if scope in scopes else set()
    if scope == ALL:
        related |= set(desired_states.by_scope)
    return [one for one in all_pauses(desired_states) if one.scope in related - {scope}]


def _living(workers: Iterable[WorkerView]) -> Iterable[WorkerInfo]:
    return (one.info for one in workers if one.lease_ms and one.info)


def _scoped(desired_states: Mapping[str, DesiredState], prefix: str) -> set[str]:
    return {scope.removeprefix(prefix) for scope in desired_states if scope.startswith(prefix)}
