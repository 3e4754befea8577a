"""Commands that change the engine itself: sleep, wake, reset, reload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tokenyard import clock
from worker.engines import Backend, Engine, Unsupported
from worker.messages import (
    Asleep,
    CommandRefused,
    Done,
    Ready,
    ReloadWeights,
    ResetPrefixCache,
    Sleep,
    ToController,
    Wake,
)


class EngineControl:
    """Runs the control commands of one engine, in the thread that owns it."""

    def __init__(
        self, engine: Engine, backend: Backend, send: Callable[[ToController], None]
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._send = send

    def __call__(self, command: Sleep | Wake | ResetPrefixCache | ReloadWeights) -> None:
        """Run a command and report; a command that the engine does not support changes nothing."""
        began = clock.monotonic()
        try:
            self._do(command)
        except Unsupported as error:
            refused = None if isinstance(command, Sleep | Wake) else command
            self._send(CommandRefused(str(error), refused))
            return
        seconds = clock.monotonic() - began
        if isinstance(command, Sleep):
            self._send(Asleep(seconds, self._backend.memory()))
        elif isinstance(command, Wake):
            info = replace(self._engine.info, phases_s={"wake": seconds})
            self._send(Ready(info, self._backend.memory()))
        else:
            self._send(Done(command))

    def _do(self, command: Sleep | Wake | ResetPrefixCache | ReloadWeights) -> None:
        match command:
            case Sleep(level):
                self._engine.sleep(level)
            case Wake():
                self._engine.wake()
            case ResetPrefixCache():
                self._engine.reset()
            case ReloadWeights(path):
                self._engine.reload(path)
