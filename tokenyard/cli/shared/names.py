"""Resolves the names of models, workers and tenants on a command line, or suggests known ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import click

from tokenyard.admin.scopes import known_models, known_workers
from tokenyard.admin.snapshot import YardView
from tokenyard.admin.tenants import TenantView
from tokenyard.protocol.control import ALL, DesiredState, model_scope, worker_scope
from tokenyard.protocol.texts import did_you_mean, printable

_MOST_NAMED: Final = 10


class UnknownName(click.ClickException):
    """The yard does not know a name."""


def find_model(view: YardView, desired_states: Mapping[str, DesiredState], name: str) -> str:
    """The model of this name; raises `UnknownName`."""
    return _known("model", name, known_models(view, desired_states))


def find_worker(view: YardView, desired_states: Mapping[str, DesiredState], name: str) -> str:
    """The name of a worker, given with or without its incarnation; raises `UnknownName`."""
    by_incarnation = {one.worker: one.info.name for one in view.living if one.info}
    return _known("worker", by_incarnation.get(name, name), known_workers(view, desired_states))


def find_scope(
    view: YardView, desired_states: Mapping[str, DesiredState], model: str, worker: str
) -> str:
    """The scope of ``--model`` or ``--worker``; without either that of all workers."""
    if model:
        return model_scope(find_model(view, desired_states, model))
    if worker:
        return worker_scope(find_worker(view, desired_states, worker))
    return ALL


def find_tenant(known: Iterable[TenantView], name: str) -> TenantView:
    """The tenant of this name; raises `UnknownName`."""
    by_name = {one.name: one for one in known}
    return by_name[known_tenant(by_name, name)]


def known_tenant(known: Iterable[str], name: str) -> str:
    """The name itself, if the yard has such a tenant; raises `UnknownName`."""
    return _known("tenant", name, sorted(known))


def _known(kind: str, name: str, names: Iterable[str]) -> str:
    known = list(names)
    if name in known:
        return name
    hint = printable(did_you_mean(name, known)) or "."
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    listed = ", ".join(map(printable, known[:_MOST_NAMED])) + more
    those = f"Known {kind}s: {listed}" if known else f"The yard knows no {kind}"
    raise UnknownName(f"there is no {kind} {name!r}{hint} {those}")
