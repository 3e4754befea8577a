"""What a controller and its worker processes tell each other over their pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenyard.protocol.control import PauseMode
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment
from tokenyard.protocol.worker_info import WorkerTotals
from worker.engines import EngineInfo, Group, Memory
from worker.models import ModelSpec
from worker.published_counts import PublishedCounts


@dataclass(frozen=True, slots=True)
class LoadModel:
    """To a warm process: make an engine for this model; with ``group`` as its leader.

    ``weights`` is the path of a checkpoint that stands in for the model's own, "" for its own.
    """

    spec: ModelSpec
    group: Group | None = None
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Attach:
    """To a warm process: lend yourself to the leader of ``group``."""

    group: Group


@dataclass(frozen=True, slots=True)
class Serve:
    """To the process: consume the lane of ``worker``; whatever was held before is not yours."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drain:
    """To the process: finish what you have and say so."""


@dataclass(frozen=True, slots=True)
class Unload:
    """To the process: let go of lane and engine, and be warm again."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """To the process: let go of the lane, and of the device's memory."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """To a sleeping process: take the device again."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """To the process: forget the prefix cache."""


@dataclass(frozen=True, slots=True)
class Profile:
    """To the process: start or stop the profiler."""

    start: bool


@dataclass(frozen=True, slots=True)
class ReloadWeights:
    """To a paused process: load this checkpoint in place of the weights; "" for the model's own."""

    path: str


@dataclass(frozen=True, slots=True)
class SetEpoch:
    """To the process: stamp this generation epoch on results from now on; None for none."""

    epoch: int | None


@dataclass(frozen=True, slots=True)
class PauseEngine:
    """To the process: run nothing until told otherwise, and say so once that is so.

    With ``abort`` what runs is dropped; with ``wait`` it is finished, and what has not begun is
    not begun; with ``keep`` everything stays where it is.
    """

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class UnpauseEngine:
    """To the process: go on."""


#: What is answered with `Done` or, where it cannot be done, with a `CommandRefused` that names it.
EngineCommand = ResetPrefixCache | Profile | ReloadWeights | SetEpoch | UnpauseEngine


@dataclass(frozen=True, slots=True)
class SubmitRequests:
    """To the process, where there is no yard: requests. One by one they cost many times as much."""

    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """To the process, where there is no yard: forget the requests of these lane entries."""

    entries: Sequence[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """To the process: stop now; what is unfinished is handed back."""


@dataclass(frozen=True, slots=True)
class Warm:
    """To the controller: no model is held; ``phases_s`` says how long it took to come here."""

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
    """To the controller: what was asked has been done."""

    errand: EngineCommand


@dataclass(frozen=True, slots=True)
class Paused:
    """To the controller: nothing runs."""

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class CommandRefused:
    """To the controller: what was asked cannot be done; all is as before."""

    reason: str
    errand: EngineCommand | None = None  # None: load or sleep, whichever is under way


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One of an engine's own metrics: values by name and labels, as Prometheus has them."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[str, tuple[tuple[str, str], ...], float]]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine measures of itself since it was made; ``engine`` is its number."""

    engine: int
    metrics: Sequence[EngineMetric]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """To the controller, once a second: how far it came, whether work waits, what it has done."""

    progress: int
    unfinished: int
    tally: WorkerTotals = field(default_factory=WorkerTotals)
    error: str = ""  # what the engine could not do the last time
    counts: PublishedCounts | None = None  # where somebody reads metrics
    stats: EngineStats | None = None  # likewise, while an engine has any


@dataclass(frozen=True, slots=True)
class Fenced:
    """To the controller: ``worker`` has lost its lease; nothing of it can be published."""

    worker: str


@dataclass(frozen=True, slots=True)
class LaneReleased:
    """To the controller: ``worker`` was given what it may not begin, and has let go of its lane."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drained:
    """To the controller: nothing is left to do."""


@dataclass(frozen=True, slots=True)
class ProcessFailed:
    """To the controller, before the process ends: why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replies:
    """To the controller, where there is no yard: replies, by lane entry."""

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
