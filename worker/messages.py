"""The messages between a controller and its worker processes, over their pipes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from tokenyard.protocol.control import PauseMode
from tokenyard.protocol.keys import PRIORITY_CLASSES
from tokenyard.protocol.replies import Reply, Status
from tokenyard.protocol.wire import Assignment
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.telemetry.metrics import Histogram
from worker.engines import EngineInfo, Memory, RankGroup
from worker.models import ModelSpec

#: The incarnation of a worker that belongs to no yard.
LOCAL: Final = "local"


class ToProcess:
    """To the main loop of a process: from the controller, or from its own lane session."""

    __slots__ = ()


class EngineCommand(ToProcess):
    """The process answers with `Done`, or with a `CommandRefused` that names the command."""

    __slots__ = ()


class ToController:
    """From a process to its controller."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LoadModel(ToProcess):
    """To a warm process: load this model; as its rank of ``group`` if there is one.

    Only the leader, rank 0, has the engine; the others attach to it. ``weights`` is the path of a
    checkpoint to load instead of the model's own weights, "" for none.
    """

    spec: ModelSpec
    group: RankGroup | None = None
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Serve(ToProcess):
    """Serve the lane of ``worker``; drop the requests of any other lane."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drain(ToProcess):
    """Finish the running requests, then report `Drained`."""


@dataclass(frozen=True, slots=True)
class Unload(ToProcess):
    """Close the lane session and unload the model."""


@dataclass(frozen=True, slots=True)
class Sleep(ToProcess):
    """Close the lane session and release the device's memory."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake(ToProcess):
    """To a sleeping process: allocate the device's memory again."""


@dataclass(frozen=True, slots=True)
class ReloadWeights(EngineCommand):
    """To a paused process: load the weights of the checkpoint at ``path``; "": the model's own."""

    path: str


@dataclass(frozen=True, slots=True)
class SetEpoch(EngineCommand):
    """Set the generation epoch of later results; None for no epoch."""

    epoch: int | None


@dataclass(frozen=True, slots=True)
class PauseEngine(EngineCommand):
    """Stop generating until `UnpauseEngine`; done when nothing runs any more.

    Mode ``abort`` drops running requests, ``wait`` finishes them and starts no others, ``keep``
    freezes them.
    """

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class UnpauseEngine(EngineCommand):
    """Resume generating."""


@dataclass(frozen=True, slots=True)
class OutputsReady(ToProcess):
    """The engine has made outputs."""


@dataclass(frozen=True, slots=True)
class Delivery(ToProcess):
    """Requests from the lane of ``worker``, batched because each message is costly."""

    worker: str
    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class AbortRequests(ToProcess):
    """``worker`` shall give up the requests of these lane entries, or can no longer publish."""

    worker: str
    entries: Sequence[str]
    charged: str = ""  # `Aborted.charged` of the only one


@dataclass(frozen=True, slots=True)
class LeaseLost(ToProcess):
    """``worker`` may no longer publish anything."""

    worker: str


@dataclass(frozen=True, slots=True)
class Stop(ToProcess):
    """Exit; unfinished requests move to other workers."""


@dataclass(frozen=True, slots=True)
class Warm(ToController):
    """The process is warm; ``phases_s`` has the seconds of each phase."""

    memory: Memory
    phases_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ready(ToController):
    """The engine can serve."""

    info: EngineInfo
    memory: Memory


@dataclass(frozen=True, slots=True)
class Asleep(ToController):
    """The engine sleeps."""

    seconds: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class Done(ToController):
    """A command has succeeded."""

    errand: EngineCommand


@dataclass(frozen=True, slots=True)
class CommandRefused(ToController):
    """A command cannot run; nothing has changed."""

    reason: str
    errand: EngineCommand | None = None  # None: the load or sleep in progress


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One of an engine's own metrics, in Prometheus's terms."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, tuple[tuple[str, str], ...], float]]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's own metrics since its creation; ``engine`` is its number."""

    engine: int
    metrics: Sequence[EngineMetric]


@dataclass(frozen=True, slots=True)
class Heartbeat(ToController):
    """Once a second: progress, unfinished requests and counts."""

    progress: int
    unfinished: int
    tally: WorkerTotals = field(default_factory=WorkerTotals)
    error: str = ""  # the engine's last error
    counts: PublishedCounts | None = None  # only if metrics are served
    stats: EngineStats | None = None  # only if metrics are served
    is_worn: bool = False  # the process should be replaced once it is idle


@dataclass(frozen=True, slots=True)
class Fenced(ToController):
    """``worker`` has lost its lease and can no longer publish."""

    worker: str


@dataclass(frozen=True, slots=True)
class LaneReleased(ToController):
    """``worker`` received requests while paused and released its lane."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drained(ToController):
    """The process has no requests left."""


@dataclass(frozen=True, slots=True)
class ProcessFailed(ToController):
    """The reason, before the process exits."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replies(ToController):
    """Without Redis: replies, by lane entry."""

    replies: Sequence[tuple[str, Reply]]


#: Statuses of results that a worker publishes.
ENDS: Final[tuple[Status, ...]] = ("completed", "failed", "expired")
DIRECTIONS: Final = ("input", "output")
Times = defaultdict[str, Histogram]


@dataclass(slots=True)
class PublishedCounts:
    """Counts of a process's publications since its start, by base model."""

    results: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # model, class, status
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # model, direction
    inputs: Counter[tuple[str, str]] = field(default_factory=Counter)  # model, task
    media: Counter[tuple[str, str]] = field(default_factory=Counter)  # model, modality
    stale: int = 0  # publications refused by the fence
    faults: int = 0  # requests returned because the engine could not serve them
    ttft: Times = field(default_factory=lambda: defaultdict(Histogram))
    tpot: Times = field(default_factory=lambda: defaultdict(Histogram))
    e2e: Times = field(default_factory=lambda: defaultdict(Histogram))

    def know(self, models: Iterable[str]) -> None:
        """Initialize the counts of these models to 0."""
        for model in models:
            for labels in product((model,), PRIORITY_CLASSES, ENDS):
                self.results.setdefault(labels, 0)
            for direction in DIRECTIONS:
                self.tokens.setdefault((model, direction), 0)
            for times in (self.ttft, self.tpot, self.e2e):
                times[model].add(Histogram())

    def add(self, other: PublishedCounts) -> None:
        """Add the counts of ``other``."""
        self.results.update(other.results)
        self.tokens.update(other.tokens)
        self.inputs.update(other.inputs)
        self.media.update(other.media)
        self.stale += other.stale
        self.faults += other.faults
        _add(self.ttft, other.ttft)
        _add(self.tpot, other.tpot)
        _add(self.e2e, other.e2e)

    def copy(self) -> PublishedCounts:
        """Return an independent copy."""
        copied = PublishedCounts()
        copied.add(self)
        return copied


def _add(ours: Times, theirs: Times) -> None:
    for model, histogram in theirs.items():
        ours[model].add(histogram)
