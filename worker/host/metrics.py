"""The controller's metrics as Prometheus reads them (docs/metrics.md).

Each worker process counts from its start and reports its counts with every heartbeat. They are kept
when it ends, so no sum ever decreases. What a killed process published after its last heartbeat, in
a second at most, is not counted.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Final

from tokenyard.scripts.answers import Why
from tokenyard.telemetry.metrics import REQUESTS, RETRIES, Histogram, Metric, histograms, numbers
from worker.host.process_handle import WorkerProcessHandle
from worker.host.process_state import State
from worker.messages import EngineMetric, EngineStats, Heartbeat, PublishedCounts

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

TOKENS = Metric(
    "tokenyard_tokens_total",
    "counter",
    ("model", "direction"),
    "Tokens generated, counted as they are made, and tokens of the prompts of completed requests.",
)
INPUTS = Metric(
    "tokenyard_inputs_total",
    "counter",
    ("model", "task"),
    "Prompts of completed requests, by what was done with them; one that pools may have many.",
)
MEDIA = Metric(
    "tokenyard_media_total",
    "counter",
    ("model", "modality"),
    "Pictures, sounds and videos of completed requests.",
)
STALE = Metric(
    "tokenyard_stale_commits_total",
    "counter",
    (),
    "Publications that were refused, since the request is another attempt's.",
)
TTFT = Metric(
    "tokenyard_ttft_seconds",
    "histogram",
    ("model",),
    "Of requests that stream: from acceptance to the first token.",
)
TPOT = Metric(
    "tokenyard_tpot_seconds",
    "histogram",
    ("model",),
    "Of requests that stream: time for each token after the first.",
)
E2E = Metric(
    "tokenyard_e2e_seconds", "histogram", ("model",), "From acceptance to the published result."
)
INFLIGHT = Metric(
    "tokenyard_inflight",
    "gauge",
    ("worker", "model"),
    "Requests that a worker has taken and not answered.",
)
SWAP = Metric(
    "tokenyard_model_swap_seconds",
    "histogram",
    ("phase",),
    "Time in which a model was loaded, woken, put to sleep or unloaded.",
)
RESTARTS = Metric(
    "tokenyard_worker_restarts_total",
    "counter",
    ("worker", "reason"),
    "Worker processes that have ended, by why; another is started in their place.",
)
METRICS: Final = (
    *(REQUESTS, TOKENS, INPUTS, MEDIA, RETRIES, STALE, TTFT, TPOT, E2E, INFLIGHT, SWAP, RESTARTS),
)
PHASES: Final = ("load", "wake", "sleep", "unload")
_WHYS: Final[tuple[Why, ...]] = ("left", "lost", "crashed")
#: Kinds of an engine's metrics that only grow while it lives.
_GROWING: Final = frozenset({"counter", "histogram"})
_Labels = tuple[tuple[str, str], ...]
_Values = defaultdict[tuple[str, _Labels], float]  # by name and labels


class HostMetrics:
    """Sums the counts of the processes; see `tokenyard.telemetry.metrics.Collector`."""

    def __init__(self, workers: Collection[str], models: Collection[str]) -> None:
        self._lock = threading.Lock()  # scrapes come in threads of their own
        self._models = models
        self._ended = PublishedCounts()  # of processes that are gone
        self._ended.know(models)
        self._running: dict[str, PublishedCounts] = {}  # by worker
        self._inflight: dict[str, tuple[str, int]] = {}  # by worker
        self._workers = workers
        self._restarts = Counter(dict.fromkeys(product(workers, _WHYS), 0))
        self._swaps = {phase: Histogram() for phase in PHASES}
        self._phases: dict[str, Mapping[str, float]] = {}  # those noted last, by worker
        self._engines = EngineMetrics()

    def heard(self, member: WorkerProcessHandle, beat: Heartbeat) -> None:
        """A process has sent a heartbeat."""
        with self._lock:
            self._inflight[member.name] = (member.model, beat.unfinished)
            if beat.counts:
                self._running[member.name] = beat.counts
            self._engines.hear(member.name, member.model, beat.stats)

    def changed(self, member: WorkerProcessHandle) -> None:
        """A process has changed its state; the time that took is observed once."""
        phases = member.phases_s
        if phases is self._phases.get(member.name):
            return
        self._phases[member.name] = phases
        phase = _phase(member.state, phases)
        if phase:
            with self._lock:
                self._swaps[phase].observe(sum(phases.values()))

    def ended(self, member: WorkerProcessHandle, why: Why) -> None:
        """A process has ended; its counts are kept."""
        with self._lock:
            counts = self._running.pop(member.name, None)
            if counts:
                self._ended.add(counts)
            self._inflight.pop(member.name, None)
            self._engines.hear(member.name, "", None)
            self._restarts[member.name, why] += 1

    def collect(self) -> Iterable[Family]:
        """All of them as they are now."""
        with self._lock:
            yield from [*self._own(), *self._engines.collect()]

    def _own(self) -> Iterator[Family]:
        counts = self._ended.copy()
        for running in self._running.values():
            counts.add(running)
        inflight = dict.fromkeys(product(self._workers, self._models), 0)
        for worker, (model, unfinished) in self._inflight.items():
            if model:
                inflight[worker, model] = unfinished
        yield numbers(REQUESTS, counts.results)
        yield numbers(TOKENS, counts.tokens)
        yield numbers(INPUTS, counts.inputs)
        yield numbers(MEDIA, counts.media)
        yield numbers(RETRIES, {("fault",): counts.faults})
        yield numbers(STALE, {(): counts.stale})
        for metric, times in ((TTFT, counts.ttft), (TPOT, counts.tpot), (E2E, counts.e2e)):
            yield histograms(metric, {(model,): one for model, one in times.items()})
        yield numbers(INFLIGHT, inflight)
        yield histograms(SWAP, {(phase,): one for phase, one in self._swaps.items()})
        yield numbers(RESTARTS, self._restarts)


def _phase(state: State, phases: Mapping[str, float]) -> str:
    """What a process has just done with a model; "" if nothing."""
    if state is State.READY:
        return "wake" if "wake" in phases else "load"
    for phase in ("sleep", "unload"):
        if phase in phases:
            return phase
    return ""


class EngineMetrics:
    """The engines' own metrics, with the worker's name as a label.

    An engine counts from 0, so the counts of earlier engines of the same worker are added.
    """

    def __init__(self) -> None:
        self._stats: dict[str, tuple[str, EngineStats]] = {}  # by worker, with its model
        self._before: _Values = defaultdict(float)
        self._about: dict[str, tuple[str, str]] = {}  # kind and help of each metric
        self._metric_of: dict[str, str] = {}  # by the name of a value

    def hear(self, worker: str, model: str, stats: EngineStats | None) -> None:
        """Take the metrics of a process's engine; None if it has none any more."""
        known = self._stats.get(worker)
        if known and (stats is None or stats.engine != known[1].engine):
            name, ended = self._stats.pop(worker)
            growing = [metric for metric in ended.metrics if metric.kind in _GROWING]
            _add(self._before, worker, name, growing)
        if stats:
            self._stats[worker] = (model, stats)
            for metric in stats.metrics:
                self._about[metric.name] = (metric.kind, metric.help)
                self._metric_of |= {name: metric.name for name, _, _ in metric.samples}

    def collect(self) -> Iterator[Family]:
        """All of them as they are now."""
        from prometheus_client.core import Metric as Family

        values = self._before.copy()
        for worker, (model, stats) in self._stats.items():
            _add(values, worker, model, stats.metrics)
        families = {name: Family(name, text, kind) for name, (kind, text) in self._about.items()}
        for (name, labels), value in values.items():
            families[self._metric_of[name]].add_sample(name, dict(labels), value)
        yield from families.values()


def _add(values: _Values, worker: str, model: str, metrics: Iterable[EngineMetric]) -> None:
    for metric in metrics:
        for name, labels, value in metric.samples:
            values[name, _labels(worker, model, labels)] += value


def _labels(worker: str, model: str, labels: _Labels) -> _Labels:
    """Add the worker, and replace vLLM's model name, a path, by the one that requests use."""
    named = dict(labels) | {"worker": worker}
    if "model_name" in named:
        named["model_name"] = model
    return tuple(sorted(named.items()))
