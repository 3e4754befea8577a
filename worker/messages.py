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

    ``weights`` is the path of a checkpoint to load instead of the model's own weights, "" for none.
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
    """To the process: serve the lane of ``worker``; drop the requests of any other lane."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drain:
    """To the process: finish the running requests, then report `Drained`."""


@dataclass(frozen=True, slots=True)
class Unload:
    """To the process: close the lane session and unload the model."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """To the process: close the lane session and release the device's memory."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """To a sleeping process: allocate the device's memory again."""


@dataclass(frozen=True, slots=True)
class ReloadWeights:
    """To a paused process: load the weights of the checkpoint at ``path``; "": the model's own."""

    path: str


@dataclass(frozen=True, slots=True)
class SetEpoch:
    """To the process: set the generation epoch of later results; None for no epoch."""

    epoch: int | None


@dataclass(frozen=True, slots=True)
class PauseEngine:
    """To the process: stop generating until `UnpauseEngine`, and report `Paused`.

    Mode ``abort`` drops running requests, ``wait`` finishes them and starts no others, ``keep``
    freezes them.
    """

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class UnpauseEngine:
    """To the process: resume generating."""


#: The process answers with `Done`, or with a `CommandRefused` that names the command.
EngineCommand = ReloadWeights | SetEpoch | UnpauseEngine


@dataclass(frozen=True, slots=True)
class SubmitRequests:
    """To the process, without Redis: requests, batched because each message is costly."""

    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """To the process, without Redis: abort the requests of these lane entries."""

    entries: Sequence[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """To the process: exit; unfinished requests move to other workers."""


@dataclass(frozen=True, slots=True)
class Warm:
    """To the controller: the process is warm; ``phases_s`` has the seconds of each phase."""

    memory: Memory
    phases_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ready:
    """To the controller: the engine can serve."""

    info: EngineInfo
    memory: Memory


@dataclass(frozen=True, slots=True)
class Asleep:
    """To the controller: the engine sleeps."""

    seconds: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class Done:
    """To the controller: a command has succeeded."""

    errand: EngineCommand


@dataclass(frozen=True, slots=True)
class Paused:
    """To the controller: the engine is paused."""

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class CommandRefused:
    """To the controller: a command cannot run; nothing has changed."""

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
class Heartbeat:
    """To the controller, once a second: progress, unfinished requests and counts."""

    progress: int
    unfinished: int
    tally: WorkerTotals = field(default_factory=WorkerTotals)
    error: str = ""  # the engine's last error
    counts: PublishedCounts | None = None  # only if metrics are served
    stats: EngineStats | None = None  # only if metrics are served
    is_worn: bool = False  # the process should be replaced once it is idle


@dataclass(frozen=True, slots=True)
class Fenced:
    """To the controller: ``worker`` has lost its lease and can no longer publish."""

    worker: str


@dataclass(frozen=True, slots=True)
class LaneReleased:
    """To the controller: ``worker`` received requests while paused and released its lane."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drained:
    """To the controller: the process has no requests left."""


@dataclass(frozen=True, slots=True)
class ProcessFailed:
    """To the controller, before the process exits: the reason."""

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
