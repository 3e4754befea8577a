"""What a controller and its worker processes tell each other over their pipe."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engines import EngineInfo


@dataclass(frozen=True, slots=True)
class Serve:
    """To the process: consume the lane of ``worker``; whatever was held before is not yours."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drain:
    """To the process: finish what you have and say so."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To the process: stop now; what is unfinished is handed back."""


@dataclass(frozen=True, slots=True)
class Ready:
    """To the controller: the engine is up."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Beat:
    """To the controller, once a second: how far it came, and whether work waits."""

    progress: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """To the controller: ``worker`` has lost its lease; nothing of it can be published."""

    worker: str


@dataclass(frozen=True, slots=True)
class Drained:
    """To the controller: nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Failed:
    """To the controller, before the process ends: why."""

    reason: str


ToProcess = Serve | Drain | Stop
ToController = Ready | Beat | Fenced | Drained | Failed
