"""Devices: a tile for each, what is about to change on them, and a page for each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tokenyard.board.page import NotFound, Parameters, numbered_page
from tokenyard.protocol.control import DesiredState, worker_scope
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.worker_info import WORKER_STATES, WorkerTotals
from tokenyard.yard.changes import CHANGING, RecentCommand, recent_commands
from tokenyard.yard.devices import DeviceView, device_views, load_times, seen_from, state_change
from tokenyard.yard.history import RecentSamples, Throughput, tallies, worker_rates
from tokenyard.yard.listing import lane_requests
from tokenyard.yard.models import WaitingRequests, read_waiting_sample, why_it_waits
from tokenyard.yard.pauses import pauses_of_worker
from tokenyard.yard.snapshot import WorkerView, YardView, read_yard, with_lanes

#: Tiles of one page; the lanes of so many workers are measured.
TILES: Final = 60
#: Commands, models that wait, and requests of a lane that are shown.
MOST_COMMANDS: Final = 10
MOST_WAITING: Final = 20
MOST_ON_LANE: Final = 50
_PAUSED: Final = "paused"
FILTERS: Final = ("host", "model", "state")
STATES: Final = ("", *WORKER_STATES, "lost", _PAUSED)
#: Colours of states in words of the style sheet.
_LOOKS: Final[Mapping[str, str]] = {
    "ready": "good",
    "loading": "warn",
    "warming": "warn",
    "draining": "warn",
    "unloading": "warn",
    "failed": "bad",
    "lost": "bad",
    "unreadable": "bad",
}


#: What the workers of each yard had done when somebody looked.
SAMPLES: Final = RecentSamples[Mapping[str, WorkerTotals]](
    span_ms=10_000, apart_ms=1_000, least_ms=1_000
)


def _rates(yard: Yard, view: YardView) -> Mapping[str, Throughput]:
    """The rate of each worker lately; empty at the first look."""
    now = tallies(view)
    before = SAMPLES.add((yard.url, yard.keys.yard), view.at_ms, now)
    return worker_rates(before[1], now, before[0]) if before else {}


def view_devices(yard: Yard, given: Parameters) -> dict[str, Any]:
    """A tile for each device that fits the filter in the address."""
    view = read_yard(yard, counts_lanes=False)
    rates = _rates(yard, view)
    every = device_views(view.workers)
    state = given.one_of("state", STATES, "")
    found = [one for one in every if _fits(one, given, state)]
    filters = {name: given.text(name) for name in FILTERS}
    page = numbered_page(given, len(found), TILES, "/devices", **filters)
    shown = _with_lanes(yard, found[page.first : page.end])
    commands = recent_commands(yard, MOST_COMMANDS)
    pending, is_whole = _pending(yard, view, commands)
    return {
        "tiles": _tiles(view, shown, rates),
        "found": len(found),
        "total": len(every),
        "states": _counts(every),
        "hosts": len({one.controller for one in every}),
        "numbered": page,
        "filters": filters,
        "state_choices": STATES,
        "commands": commands,
        "pending": pending,
        "is_whole_sample": is_whole,
        "at_ms": view.at_ms,
    }


def _fits(one: DeviceView, given: Parameters, state: str) -> bool:
    host, model = given.text("host").lower(), given.text("model").lower()
    places = (one.controller, one.host, one.name)
    held = [one.model, *(each.info.model for each in one.others if each.info)]
    return (
        (not host or any(host in place.lower() for place in places))
        and (not model or any(model in each.lower() for each in held))
        and (state in {"", one.worker.state} or (state == _PAUSED and is_paused(one.worker)))
    )


def is_paused(worker: WorkerView) -> bool:
    """Whether a worker has reached another run state than RUNNING."""
    return worker.run_state != "RUNNING"


def _with_lanes(yard: Yard, devices: Sequence[DeviceView]) -> list[DeviceView]:
    measured = with_lanes(yard, [one.worker for one in devices])
    return [replace(one, worker=worker) for one, worker in zip(devices, measured, strict=True)]


def _tiles(
    view: YardView, devices: Iterable[DeviceView], rates: Mapping[str, Throughput]
) -> list[dict[str, Any]]:
    """What is shown of each device."""
    times = load_times(view.hosts)
    return [
        {
            "device": one,
            "change": state_change(one, times, view.at_ms),
            "rate": rates.get(one.worker.worker),  # None: not known yet
            "look": _LOOKS.get(one.worker.state, ""),
        }
        for one in devices
    ]


def _counts(devices: Sequence[DeviceView]) -> list[tuple[str, int]]:
    """Devices by state, most first, and those that are paused."""
    states = Counter[str](one.worker.state for one in devices)
    states[_PAUSED] = sum(is_paused(one.worker) for one in devices)
    return [(state, count) for state, count in states.most_common() if count]


def _pending(
    yard: Yard, view: YardView, commands: Sequence[RecentCommand]
) -> tuple[list[tuple[WaitingRequests, str]], bool]:
    """The requests whose models no worker serves, and why; whether these are all requests."""
    sample = read_waiting_sample(yard, view)
    without = [one for one in sample.models if one.model not in view.models]
    found = [(one, why_it_waits(view, one.model, commands)) for one in without[:MOST_WAITING]]
    return found, sample.is_whole


# One worker


def view_worker(yard: Yard, given: Parameters) -> dict[str, Any]:
    """One worker."""
    view = read_yard(yard, counts_lanes=False)
    rates = _rates(yard, view)
    worker = _find(view, given.text("worker"))
    [device] = _with_lanes(yard, [seen_from(device_views(view.workers), worker)])
    [tile] = _tiles(view, [device], rates)
    scope = worker_scope(device.name)
    return {
        "tile": tile,
        "facts": _facts(worker),
        "requests": lane_requests(yard, worker.worker, MOST_ON_LANE),
        "pauses": [one.text(view.at_ms) for one in pauses_of_worker(view, worker.worker)],
        "commands": recent_commands(yard, MOST_COMMANDS, worker=device.name, verbs=CHANGING),
        "scope": scope,
        "run_state": view.desired_states.by_scope.get(scope, DesiredState()).run_state,
        "loadable": _loadable(view, device),
        "at_ms": view.at_ms,
    }


def _find(view: YardView, name: str) -> WorkerView:
    """A worker by its name, with or without its incarnation; of several the living one."""
    found = [one for one in view.workers if name in {one.worker, one.info and one.info.name}]
    if not found:
        raise NotFound(f"There is no worker {name[:200]!r}: it has left, or never was here.")
    return max(found, key=lambda one: one.lease_ms)


def _loadable(view: YardView, device: DeviceView) -> list[str]:
    """The models that its host may load beside the one that it holds."""
    models = (host.models for host in view.hosts if host.name == device.controller)
    return [one.name for one in next(models, []) if one.name != device.model]


#: Label, how it is shown (as unix ms, bytes, a count or a text), and the value of a roster entry.
_FACTS: Final[Sequence[tuple[str, str, Callable[[Any], Any]]]] = (
    ("Host", "text", lambda info: info.host),
    ("Controller", "text", lambda info: info.controller),
    ("Process", "text", lambda info: info.pid),
    ("Started", "at", lambda info: info.started_ms),
    ("In this state since", "at", lambda info: info.since_ms),
    ("Engine", "text", lambda info: f"{info.engine} {info.engine_version}".strip()),
    ("Model", "text", lambda info: info.model),
    ("Revision", "text", lambda info: info.revision),
    ("Weights", "text", lambda info: info.weights),
    ("Adapters", "text", lambda info: ", ".join(info.adapters)),
    ("Group", "text", lambda info: ", ".join(info.group)),
    ("Generation epoch", "text", lambda info: "" if info.epoch is None else str(info.epoch)),
    ("Requests at once", "count", lambda info: info.max_num_seqs),
    ("Longest lane", "count", lambda info: info.lane_limit),
    ("Longest request, tokens", "count", lambda info: info.max_model_len),
    ("Prefix cache, tokens", "count", lambda info: info.cache_tokens),
    ("Vocabulary", "count", lambda info: info.vocab_size),
    ("Tokenizer", "text", lambda info: info.tokenizer),
    ("Memory", "size", lambda info: info.memory_bytes),
    ("Memory before any model", "size", lambda info: info.warm_bytes),
    ("Device changed its model", "at", lambda info: info.swapped_ms),
    ("Results since it joined", "count", lambda info: info.tally.finished),
    ("Tokens since it joined", "count", lambda info: info.tally.tokens),
    ("Run state", "text", lambda info: info.run_state),
    ("Last signal obeyed", "text", lambda info: info.obeyed),
    ("Lease, ms", "count", lambda info: info.lease_ms),
)


def _facts(worker: WorkerView) -> list[tuple[str, str, Any]]:
    """A roster entry in words; empty values are left out."""
    if worker.info is None:
        return []
    named = [(label, kind, value(worker.info)) for label, kind, value in _FACTS]
    return [one for one in named if one[2] not in ("", None, 0)]
