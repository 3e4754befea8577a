"""The pauses that keep requests waiting, and the scopes of signals: models and workers. No I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from tokenyard.protocol.control import (
    ALL,
    DesiredStates,
    PauseMode,
    RunState,
    model_scope,
    said,
    worker_scope,
)
from tokenyard.protocol.texts import printable, span
from tokenyard.protocol.worker_info import WorkerInfo
from tokenyard.yard.snapshot import RosterView, WorkerView, YardView

_NOT_YET: Final = "it has not obeyed the last signal yet"
#: States in which a worker cannot serve, whatever its desired state.
_NOT_SERVING: Final = frozenset({"failed", "attached", "left", "lost"})
_adapters_decoder = msgspec.json.Decoder(dict[str, str])


class Pause(Struct, frozen=True, kw_only=True):
    """A scope whose workers an operator has paused or suspended."""

    scope: str
    run_state: RunState  # PAUSED or SUSPENDED
    mode: PauseMode = "abort"
    by: str = ""  # the operator; empty: unknown
    why: str = ""
    since_ms: int = 0  # unix ms by the server's clock; 0: unknown

    def text(self, now_ms: int) -> str:
        """The pause in one line for people."""
        return printable(f"{said(self.scope)} {self.run_state}") + self.detail(now_ms)

    def detail(self, now_ms: int) -> str:
        """Duration, operator and reason, as far as known."""
        since = f" for {span(now_ms - self.since_ms)}" if self.since_ms and now_ms else ""
        by = f" by {self.by}" if self.by else ""
        why = f": {self.why}" if self.why else ""
        return printable(f"{since}{by}{why}")


def all_pauses(desired_states: DesiredStates) -> list[Pause]:
    """All paused and suspended scopes, by name."""
    return _in_scopes(desired_states, sorted(desired_states.by_scope))


def pauses_of_model(view: YardView, model: str) -> list[Pause]:
    """The pauses that keep all workers from requests for a model ("": the yard's only one).

    Empty if one of them runs. If no worker holds the model, any worker could load it.
    """
    base = base_model(view, model)
    living = [worker for worker in view.living if worker.state not in _NOT_SERVING]
    holders = [one for one in living if not base or (one.info and one.info.model == base)]
    found: list[Pause] = []
    for worker in holders or living:
        pauses = list(_pauses_of(view.desired_states, worker, base))
        if not pauses:
            return []
        found += pauses
    if not living:
        found = _in_scopes(view.desired_states, (ALL, model_scope(base)))
    return _each_once(found)


def pauses_of_worker(view: YardView, worker: str) -> list[Pause]:
    """The pauses that keep a worker, by name and incarnation, from running its lane."""
    found = [one for one in view.workers if one.worker == worker and one.info]
    return _each_once(pause for one in found for pause in _pauses_of(view.desired_states, one, ""))


def texts(pauses: Iterable[Pause], now_ms: int) -> str:
    """Several pauses in one line."""
    return "; ".join(pause.text(now_ms) for pause in pauses)


def _pauses_of(desired_states: DesiredStates, worker: WorkerView, model: str) -> Iterator[Pause]:
    """The pauses of a worker's scopes, or its own if it has not obeyed an unpause yet."""
    info = worker.info
    if info is None:
        return
    scopes = (ALL, model_scope(info.model or model), worker_scope(info.name))
    found = _in_scopes(desired_states, scopes)
    yield from found
    if not found and worker.run_state != "RUNNING":
        yield Pause(scope=worker_scope(info.name), run_state=worker.run_state, why=_NOT_YET)


def _in_scopes(desired_states: DesiredStates, scopes: Iterable[str]) -> list[Pause]:
    found = ((scope, desired_states.by_scope.get(scope)) for scope in scopes)
    return [
        Pause(
            scope=scope,
            run_state=one.run_state,
            mode=one.mode,
            by=one.by,
            why=one.why,
            since_ms=one.since_ms,
        )
        for scope, one in found
        if one and one.run_state != "RUNNING"
    ]


def _each_once(pauses: Iterable[Pause]) -> list[Pause]:
    return list({pause.scope: pause for pause in pauses}.values())


def base_model(view: YardView, model: str) -> str:
    """The model that serves a name, which may be that of an adapter."""
    if not model:
        return view.handshake.get("default_model", "")
    for worker in view.workers:
        if worker.info and model in worker.info.adapters:
            return worker.info.model
    adapters: dict[str, str] = {}
    with contextlib.suppress(msgspec.MsgspecError):
        adapters = _adapters_decoder.decode(view.handshake.get("adapters", "{}"))
    return adapters.get(model, model)


def known_models(view: RosterView) -> list[str]:
    """Models that a host may load or might, a worker holds, or a desired state names."""
    names = {model.name for host in (*view.hosts, *view.gone) for model in host.models}
    names |= {info.model for info in view.live.values() if info.model}
    return sorted(names | _scoped(view.desired_states, model_scope("")))


def known_workers(view: RosterView) -> list[str]:
    """Names of the workers that live, or that a desired state names."""
    names = {info.name for info in view.live.values()}
    return sorted(names | _scoped(view.desired_states, worker_scope("")))


def scopes_of(info: WorkerInfo) -> set[str]:
    """The scopes that a worker is in."""
    models = {model_scope(info.model)} if info.model else set()
    return {ALL, worker_scope(info.name), *models}


def workers_in(live: Mapping[str, WorkerInfo], scope: str) -> list[str]:
    """The live workers in a scope, with their incarnation, by name."""
    return [worker for worker, info in sorted(live.items()) if scope in scopes_of(info)]


def other_pauses(view: RosterView, scope: str) -> list[Pause]:
    """The pauses of other scopes that hold workers of this one."""
    related = {ALL}
    for info in view.live.values():
        scopes = scopes_of(info)
        related |= scopes if scope in scopes else set()
    if scope == ALL:
        related |= set(view.desired_states.by_scope)
    return [one for one in all_pauses(view.desired_states) if one.scope in related - {scope}]


def _scoped(desired_states: DesiredStates, prefix: str) -> set[str]:
    scopes = desired_states.by_scope
    return {scope.removeprefix(prefix) for scope in scopes if scope.startswith(prefix)}
