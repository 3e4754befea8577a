"""One program of a local yard: started, listened to, started again when it dies, stopped."""

from __future__ import annotations

import re
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenyard.process.children import start_child, stop_child
from tokenyard.process.program import Exit

#: A program that dies more often than this within the window is given up.
MAX_DEATHS: Final = 3
DEATH_WINDOW_S: Final = 60.0
_LAST_LINES: Final = 12
#: With this click, and so each of our programs, begins to tell why it has ended.
_ERROR: Final = "\nError: "
#: The error is the last thing in a log, and no longer than this.
_ERROR_BYTES: Final = 16384
#: A line of one of our loggers; engines and libraries write in forms of their own.
_LOG_LINE: Final = re.compile(
    r"\d{4}-\d\d-\d\d \S+ (?:(?P<level>[A-Z]+) )?tokenyard[.\w]*:? (?P<text>.*)"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """What a program said through one of our loggers."""

    level: str
    text: str

    @property
    def is_serious(self) -> bool:
        """Whether a user should see it in any case."""
        return self.level in {"WARNING", "ERROR", "CRITICAL"}


class Child:
    """A program that runs beside this one and writes to a log file.

    It writes to the file itself, not through a pipe, so it never waits for us and can finish
    cleanly when we are killed.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], stop_s: float
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._env = env
        self._stop_s = stop_s
        self._process: subprocess.Popen[bytes] | None = None
        self._read_to = 0
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    @property
    def pid(self) -> int:
        """Its process; 0 before `start`."""
        return self._process.pid if self._process else 0

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start it; its log begins anew."""
        self.log.write_bytes(b"")
        self._read_to = 0
        self._launch()

    def _launch(self) -> None:
        self._process = start_child(self._command, self.log, env=self._env)

    def restart(self) -> bool:
        """Start it again after its death; False where it has died too often or in order.

        One that has ended in order, by wrong usage or since its workers cannot start would only
        end so again.
        """
        now = time.monotonic()
        often = len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATH_WINDOW_S
        if often or self.status in {Exit.OK, Exit.USAGE, Exit.START_FAILED}:
            return False
        self._deaths.append(now)
        time.sleep(0.25 * 2 ** len(self._deaths))
        self._launch()
        return True

    def listen(self) -> Iterator[LogLine]:
        """What it has logged since the last time."""
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._last.append(line)
            if found := _LOG_LINE.fullmatch(line):
                yield LogLine(found["level"] or "INFO", found["text"])

    def last_words(self) -> str:
        """The end of its log."""
        deque(self.listen(), maxlen=0)
        return "\n".join(self._last)

    def error(self) -> str:
        """The error with which it ended, as it told its user; "" where there is none."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _ERROR_BYTES))
            text = log.read().decode(errors="replace")
        _before, _error, told = text.rpartition(_ERROR)
        return told.strip() if _error else ""

    def terminate(self) -> None:
        """Tell it to end, without waiting for that."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, hurry: Callable[[], bool]) -> None:
        """End it within its time, or sooner where ``hurry`` says so; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            stop_child(process, self._stop_s, hurry)
