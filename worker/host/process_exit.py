"""How a worker process ended: its exit status, whose doing it was, and the reason in words."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Final

from tokenyard.scripts import Why
from worker.host.diagnosis import FailedStart, Phase
from worker.host.output import Output

#: The status that multiprocessing reports when the fork-server can no longer say how it ended.
UNKNOWN_STATUS: Final = 255
#: Signals that come from outside, such as the kernel's when memory runs out.
_KILLS: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a process; ``status`` is None if it lives or never started."""

    status: int | None
    pid: int
    last_words: str  # its own reason, or why it was killed

    @classmethod
    def of(cls, process: BaseProcess | None, last_words: str) -> ProcessExit:
        """Wait for the end of a process that is dead or about to be."""
        if process is None:
            return cls(None, 0, last_words)
        process.join()
        return cls(process.exitcode, process.pid or 0, last_words)

    def why(self, known: Why | None = None) -> tuple[Why, str]:
        """The cause for the yard and the reason in words; ``known`` overrides the cause."""
        words = f": {self.last_words}" if self.last_words else ""
        if self.status == UNKNOWN_STATUS and _is_alive(self.pid):
            return known or "lost", f"its fork-server is gone{words}"
        if self.status is None or self.status >= 0:
            return known or "crashed", f"exit status {self.status}{words}"
        is_killed = -self.status in _KILLS and not self.last_words
        cause: Why = "lost" if is_killed else "crashed"
        return known or cause, f"ended by {_signal_name(-self.status)}{words}"

    def failed_start(self, phase: Phase, output: Output | None, model: str) -> FailedStart:
        """What is known of a process that ended before it was of any use."""
        is_killed = self.status is not None and self.status < 0 and not self.last_words
        return FailedStart(
            phase,
            signal=_signal_name(-self.status) if is_killed and self.status else "",
            status=self.status,
            said=self.last_words,
            output=output.lines if output else (),
            crash=output.crash if output else (),
            model=model,
        )

    def kill_survivor(self) -> None:
        """Kill a process that only looks dead because its fork-server was killed."""
        if self.status == UNKNOWN_STATUS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_name(number: int) -> str:
    """``SIGKILL`` and so on; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
