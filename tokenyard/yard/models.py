"""The models of a yard: which hosts may load them, which workers hold them, which requests wait.

The leader's decisions are in its memory only; why requests wait follows from what it works with:
the roster, the hosts, and the commands that it has sent. Errors of redis-py pass, for
`tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.protocol.control import ALL, DesiredState, model_scope
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.parse import unfold
from tokenyard.protocol.streams import whole
from tokenyard.protocol.texts import counted, printable, span
from tokenyard.protocol.worker_info import ModelInfo, WorkerInfo
from tokenyard.yard.changes import RecentCommand
from tokenyard.yard.devices import load_times
from tokenyard.yard.pauses import (
    Pause,
    all_pauses,
    base_model,
    known_models,
    pauses_of_model,
    texts,
)
from tokenyard.yard.reads import Fields, intakes
from tokenyard.yard.requests import TOKEN_BYTES, accepted_ms
from tokenyard.yard.snapshot import YardView


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model of the yard, at one moment."""

    name: str
    hosts: Mapping[str, ModelInfo]  # that may load it, by controller, and what they say of it
    gone: Mapping[str, ModelInfo]  # the same of one that is not there, where no other may load it
    workers: Mapping[str, WorkerInfo]  # that hold it, by name and incarnation
    desired_state: DesiredState  # of all and of this model
    pauses: list[Pause]  # of all and of this model

    @property
    def offers(self) -> Mapping[str, ModelInfo]:
        """What hosts say of it; where none is there, the last that was."""
        return self.hosts or self.gone

    @property
    def states(self) -> Mapping[str, int]:
        """Its workers by state, most first."""
        return dict(Counter[str](one.state for one in self.workers.values()).most_common())

    @property
    def load_s(self) -> float:
        """The shortest last load on its hosts; 0: none was measured."""
        return min((one.load_s for one in self.offers.values() if one.load_s), default=0.0)

    @property
    def swap_s(self) -> float:
        """The shortest last swap on its hosts; 0: none was measured."""
        return min((one.swap_s for one in self.offers.values() if one.swap_s), default=0.0)

    @property
    def pin(self) -> int:
        """Workers that always hold it."""
        return max((one.pin for one in self.offers.values()), default=0)

    @property
    def ranks(self) -> int:
        """Devices that it needs."""
        return max((one.ranks for one in self.offers.values()), default=1)

    @property
    def adapters(self) -> Sequence[str]:
        """Names that it also serves, of all its hosts and workers."""
        of_hosts = (name for one in self.offers.values() for name in one.adapters)
        of_workers = (name for one in self.workers.values() for name in one.adapters)
        return sorted({*of_hosts, *of_workers})

    @property
    def faults(self) -> Sequence[str]:
        """Why hosts could not load it when they last tried, the latest first."""
        failed = [one for one in self.offers.values() if one.fault]
        failed.sort(key=lambda one: -one.faulted_ms)
        return [one.fault for one in failed]


def model_views(view: YardView) -> list[ModelView]:
    """Every known model, by name."""
    offers: defaultdict[str, dict[str, ModelInfo]] = defaultdict(dict)
    for host in view.hosts:
        for info in host.models:
            offers[info.name][host.name] = info
    gone = {info.name: {host.name: info} for host in view.gone for info in host.models}
    workers: defaultdict[str, dict[str, WorkerInfo]] = defaultdict(dict)
    for worker, held in view.live.items():
        workers[held.model][worker] = held
    pauses = all_pauses(view.desired_states)
    return [
        ModelView(
            name=name,
            hosts=offers[name],
            gone=gone.get(name, {}),
            workers=workers[name],
            desired_state=view.desired_states.of("", name),
            pauses=[one for one in pauses if one.scope in {ALL, model_scope(name)}],
        )
        for name in known_models(view)
    ]


#: Entries of each common intake that are read, the oldest ones.
MOST_COMMON: Final = 25
#: Tenants in line whose intakes are read, and entries of each.
MOST_TENANTS: Final = 10
MOST_OF_TENANT: Final = 5
#: Of requests that are longer than this on average, fewer are read.
_USUAL_BYTES: Final = 4096
#: The leader gives up on a load without an effect after about so long.
_PATIENCE_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class WaitingRequests:
    """The requests in a sample that wait for one model."""

    model: str  # its base model; "" where none is known
    count: int
    oldest_ms: int  # age of the oldest of them


@dataclass(frozen=True, slots=True)
class WaitingSample:
    """A sample of what waits."""

    models: Sequence[WaitingRequests]  # most requests first
    read: int  # requests in the sample
    waiting: int  # requests in all intakes

    @property
    def is_whole(self) -> bool:
        """Whether the sample has all of them."""
        return self.read >= self.waiting

    def of(self, model: str) -> WaitingRequests:
        """What waits for a model."""
        nothing = WaitingRequests(model, 0, 0)
        return next((one for one in self.models if one.model == model), nothing)


def read_waiting_sample(yard: Yard, view: YardView) -> WaitingSample:
    """Read the oldest requests of each common intake and of the first tenants in line."""
    waiting = sum(view.waiting.values())
    entries = list(_oldest(yard, waiting)) if waiting else []
    counts: Counter[str] = Counter()
    since: dict[str, int] = {}
    bases: dict[str, str] = {}
    for entry, fields in entries:
        name = _model(fields)
        if name not in bases:
            bases[name] = base_model(view, name)
        # One that is tried again has a new entry, and its old id.
        came_ms = accepted_ms(fields.get(b"sid", entry).decode(errors="replace"))
        model = bases[name]
        counts[model] += 1
        since[model] = min(since.get(model, came_ms), came_ms)
    models = [
        WaitingRequests(model, count, max(0, view.at_ms - since[model]))
        for model, count in counts.most_common()
    ]
    return WaitingSample(models, len(entries), max(len(entries), waiting))


def _oldest(yard: Yard, waiting: int) -> Iterator[tuple[bytes, Fields]]:
    run: Any = yard.connection
    tokens = run.hget(yard.keys.tally, "queued_tokens")
    size = TOKEN_BYTES * max(0, whole(tokens)) / waiting
    share = min(1.0, _USUAL_BYTES / size) if size else 1.0
    common, tenants, of_tenant = (
        max(1, int(share * most)) for most in (MOST_COMMON, MOST_TENANTS, MOST_OF_TENANT)
    )
    pipeline = run.pipeline(transaction=False)
    for of_class, name in intakes(yard, tenants):
        pipeline.xrange(yard.keys.intake(name), count=common if name == of_class else of_tenant)
    for page in pipeline.execute():
        yield from page


def _model(fields: Fields) -> str:
    """The model that a request names; "" for none."""
    try:
        return unfold(fields).get(b"model", b"").decode(errors="replace")
    except InvalidRequest:
        return ""


def why_it_waits(view: YardView, model: str, commands: Sequence[RecentCommand]) -> str:
    """Why requests for a model wait, in words; ``commands`` are loads, the newest first."""
    if view.leader is None:
        return view.broker_error or "no coordinator leads the yard: start one"
    if pauses := pauses_of_model(view, model):
        return texts(pauses, view.at_ms)
    return next(_reasons(view, model, commands), "no device is free or idle, or it is not its turn")


def _reasons(view: YardView, model: str, commands: Sequence[RecentCommand]) -> Iterator[str]:
    """The reasons, the best first."""
    holders = [one for one in view.living if one.info and one.info.model == model]
    ready = sum(one.is_serving for one in holders)
    if ready:
        yield f"{counted(ready, 'worker')} {'serves' if ready == 1 else 'serve'} it: in turn"
    yield from (_loading(one.info, view) for one in holders if one.info and one.state == "loading")
    yield from _commanded(view, model, commands)
    yield from _hopeless(view, model)
    draining = [one.worker for one in holders if one.state in {"draining", "unloading"}]
    if draining:
        yield f"{', '.join(draining)} is giving it up"


def _loading(info: WorkerInfo, view: YardView) -> str:
    usual_s = load_times(view.hosts).get((info.controller, info.model), 0.0)
    usual = f"; its last load took {span(1000 * usual_s)}" if usual_s else ""
    return f"{info.name} has been loading it for {span(view.at_ms - info.since_ms)}{usual}"


def _commanded(view: YardView, model: str, commands: Sequence[RecentCommand]) -> Iterator[str]:
    """A load that was commanded a short while ago and has neither succeeded nor failed."""
    for one in commands:
        age_ms = view.at_ms - one.at_ms
        if one.command.model == model and one.answer is None and age_ms < _PATIENCE_MS:
            why = f": {one.command.why}" if one.command.why else ""
            yield printable(f"{one.worker_name} was told {span(age_ms)} ago to load it{why}")


def _hopeless(view: YardView, model: str) -> Iterator[str]:
    """Why no host can load it, or could when it last tried."""
    offers = [(host, info) for host in view.hosts for info in host.models if info.name == model]
    fitting = [(host, info) for host, info in offers if info.ranks <= host.devices]
    if any(info.name == model for host in view.gone for info in host.models):
        yield "no host that may load it is there: start one"
    elif not offers:
        yield "no live host may load it: put it into a models file"
    elif not fitting:
        ranks = min(info.ranks for _, info in offers)
        yield f"it takes {ranks} devices of one host, and no host that may load it has so many"
    elif all(info.fault for _, info in fitting):
        host, last = max(fitting, key=lambda one: one[1].faulted_ms)
        times = counted(last.faults, "time")
        fault = f"it could not be loaded, {times} in a row on {host.name}: {last.fault}"
        yield printable(f"{fault}; it is tried again after a pause")
