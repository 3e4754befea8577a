"""The messages between a controller and its worker processes, over their pipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenyard.protocol.control import PauseMode
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment
from tokenyard.protocol.worker_info import WorkerTotals
from worker.engines import EngineInfo, Memory, RankGroup
from worker.models import ModelSpec
from worker.published_counts import PublishedCounts


@dataclass(frozen=True, slots=True)
class LoadModel:
    """To a warm process: load this model; as the leader of ``group`` if there is one.

    ``weights`` is the path of a checkpoint that replaces the model's own weights, "" for none.
    """

    spec: ModelSpec
    group: RankGroup | None = None
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Attach:
    """To a warm process: attach to the leader of ``group``."""

    group: RankGroup


@dataclass(frozen=True, slots=True)
class Serve:
    """To the process: serve the lane of ``worker``, and drop the requests of another lane."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drain:
    """To the process: finish the requests and report `Drained`."""


@dataclass(frozen=True, slots=True)
class Unload:
    """To the process: end the lane session and unload the model."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """To the process: end the lane session and release the device's memory."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """To a sleeping process: take the device's memory again."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """To the process: clear the prefix cache."""


@dataclass(frozen=True, slots=True)
class Profile:
    """To the process: start or stop the profiler."""

    start: bool


@dataclass(frozen=True, slots=True)
class ReloadWeights:
    """To a paused process: load the weights of this checkpoint; "" for the model's own."""

    path: str


@dataclass(frozen=True, slots=True)
class SetEpoch:
    """To the process: the generation epoch of results from now on; None for none."""

    epoch: int | None


@dataclass(frozen=True, slots=True)
class PauseEngine:
    """To the process: stop generating until `UnpauseEngine`, and report `Paused`.

    ``abort`` drops running requests, ``wait`` finishes them and begins no others, ``keep`` leaves
    them where they are.
    """

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class UnpauseEngine:
    """To the process: continue."""


#: Answered with `Done`, or with a `CommandRefused` that names the command.
EngineCommand = ResetPrefixCache | Profile | ReloadWeights | SetEpoch | UnpauseEngine


@dataclass(frozen=True, slots=True)
class SubmitRequests:
    """To the process, without Redis: requests, in batches because each message is costly."""

    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """To the process, without Redis: abort the requests of these lane entries."""

    entries: Sequence[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """To the process: end; unfinished requests move on."""


@dataclass(frozen=True, slots=True)
class Warm:
    """To the controller: no model is loaded; ``phases_s`` has the seconds that took."""

    memory: Memory
    phases_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ready:
    """To the controller: the engine is up."""

    info: EngineInfo
    memory: Memory


@dataclass(frozen=True, slots=True)
class Asleep:
    """To the controller: the engine sleeps."""

    seconds: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class Done:
    """To the controller: a command is done."""

    errand: EngineCommand


@dataclass(frozen=True, slots=True)
class Paused:
    """To the controller: nothing runs."""

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class CommandRefused:
    """To the controller: a command cannot be run; nothing has changed."""

    reason: str
    errand: EngineCommand | None = None  # None: the load or sleep in progress


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One of an engine's own metrics, as Prometheus has it."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, tuple[tuple[str, str], ...], float]]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's own metrics since it was made; ``engine`` is its number."""

    engine: int
    metrics: Sequence[EngineMetric]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """To the controller, once a second: progress, unfinished requests, counts."""

    progress: int
    unfinished: int
    tally: WorkerTotals = field(default_factory=WorkerTotals)
    error: str = ""  # the engine's last error
    counts: PublishedCounts | None = None  # if metrics are served
    stats: EngineStats | None = None  # likewise


@dataclass(frozen=True, slots=True)
class Fenced:
    """To the controller: ``worker`` has lost its lease and can publish nothing."""

    worker: str


@dataclass(frozen=True, slots=True)
class LaneReleased:
    """To the controller: ``worker`` got requests while paused and has released its lane."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drained:
    """To the controller: no request is left."""


@dataclass(frozen=True, slots=True)
class ProcessFailed:
    """To the controller, before the process ends: the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replies:
    """To the controller, without Redis: replies, by lane entry."""

    replies: Sequence[tuple[str, Reply]]


ToProcess = (
    LoadModel
    | Attach
    | Serve
    | Drain
    | Unload
    | Sleep
    | Wake
    | PauseEngine
    | EngineCommand
    | SubmitRequests
    | AbortRequests
    | Stop
)
ToController = (
    Warm
    | Ready
    | Asleep
    | Done
    | CommandRefused
    | Paused
    | LaneReleased
    | Heartbeat
    | Fenced
    | Drained
    | ProcessFailed
    | Replies
)
