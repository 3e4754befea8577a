"""What is done to an engine beside giving it requests: sleep, wake, reset, profile, reload."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from worker.engines import Backend, Engine, Unsupported
from worker.messages import (
    Asleep,
    CommandRefused,
    Done,
    Profile,
    Ready,
    ReloadWeights,
    ResetPrefixCache,
    Sleep,
    ToController,
    Wake,
)


class EngineControl:
    """Tends one engine, in the thread that owns it."""

    def __init__(
        self, engine: Engine, backend: Backend, tell: Callable[[ToController], None]
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._tell = tell

    def __call__(self, command: Sleep | Wake | ResetPrefixCache | Profile | ReloadWeights) -> None:
        """Do it and tell the controller; what the engine cannot do leaves all as it was."""
        began = time.perf_counter()
        try:
            self._do(command)
        except Unsupported as error:
            errand = None if isinstance(command, Sleep | Wake) else command
            self._tell(CommandRefused(str(error), errand))
            return
        seconds = time.perf_counter() - began
        if isinstance(command, Sleep):
            self._tell(Asleep(seconds, self._backend.memory()))
        elif isinstance(command, Wake):
            info = replace(self._engine.info, phases_s={"wake": seconds})
            self._tell(Ready(info, self._backend.memory()))
        else:
            self._tell(Done(command))

    def _do(self, command: Sleep | Wake | ResetPrefixCache | Profile | ReloadWeights) -> None:
        match command:
            case Sleep(level):
                self._engine.sleep(level)
            case Wake():
                self._engine.wake()
            case ResetPrefixCache():
                self._engine.reset()
            case Profile(start):
                self._engine.profile(start=start)
            case ReloadWeights(path):
                self._engine.reload(path)
