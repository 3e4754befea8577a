"""A program of a local yard: starts, restarts and stops it, and reads its log."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tokenyard import clock
from tokenyard.process.children import start_child, stop_child
from tokenyard.process.program import Exit

#: A program that dies more often within the window is not restarted.
MAX_DEATHS: Final = 3
DEATH_WINDOW_S: Final = 60.0
_LAST_LINES: Final = 12
#: The start of click's error message, with which our programs end.
_ERROR: Final = "\nError: "
#: The error is at the end of the log, and not longer.
_ERROR_BYTES: Final = 16384
#: By so many bytes we know that a log is as we have read it.
_READ_LAST: Final = 64
#: A line of our loggers; engines and libraries have other formats.
_LOG_LINE: Final = re.compile(
    r"\d{4}-\d\d-\d\d \S+ (?:(?P<level>[A-Z]+) )?tokenyard[.\w]*:? (?P<text>.*)"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of our loggers."""

    level: str
    text: str

    @property
    def is_serious(self) -> bool:
        """Whether the user must see it."""
        return self.level in {"WARNING", "ERROR", "CRITICAL"}


class Child:
    """A program that runs beside this one and writes to a log file.

    It writes to the file directly, so it never waits for us and can finish if we are killed. If
    somebody moves or deletes the file, we write what comes then to a new one.
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
        self._output: BinaryIO | None = None  # the file it writes to, whatever its name is now
        self._read_to, self._read_last = 0, b""
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
        """Start it with an empty log."""
        self.log.write_bytes(b"")
        self._launch()

    def _launch(self) -> None:
        self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._process = start_child(self._command, self.log, env=self._env)
        if self._output is None or not self._is_log(self._output):
            if self._output is not None:
                self._output.close()
            self._output, self._read_to, self._read_last = self.log.open("rb"), 0, b""

    def restart(self) -> bool:
        """Restart it; False if it died too often, or would end in the same way again."""
        now = clock.monotonic()
        often = len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATH_WINDOW_S
        if often or self.status in {Exit.OK, Exit.USAGE, Exit.START_FAILED}:
            return False
        self._deaths.append(now)
        clock.sleep(0.25 * 2 ** len(self._deaths))
        self._launch()
        return True

    def listen(self) -> Iterator[LogLine]:
        """The lines logged since the last call."""
        whole = self._read_lines()
        for line in whole.decode(errors="replace").splitlines():
            self._last.append(line)
            if found := _LOG_LINE.fullmatch(line):
                yield LogLine(found["level"] or "INFO", found["text"])

    def _read_lines(self) -> bytes:
        if self._output is None:
            return b""
        self._output.seek(self._read_to - len(self._read_last))
        if self._output.read(len(self._read_last)) != self._read_last:
            self._read_to, self._read_last = self._output.seek(0), b""  # somebody has emptied it
        text = self._output.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        self._read_last = whole[-_READ_LAST:] or self._read_last
        if whole and not self._is_log(self._output):
            with contextlib.suppress(OSError):
                self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self.log.open("ab") as log:
                    log.write(whole)
        return whole

    def _is_log(self, file: BinaryIO) -> bool:
        """Whether an open file still has the name of the log."""
        try:
            return os.path.samestat(self.log.stat(), os.fstat(file.fileno()))
        except OSError:
            return False

    def log_end(self) -> str:
        """The end of its log."""
        deque(self.listen(), maxlen=0)
        return "\n".join(self._last)

    def error(self) -> str:
        """The error message with which it ended; "" if there is none."""
        if self._output is None:
            return ""
        self._output.seek(max(0, os.fstat(self._output.fileno()).st_size - _ERROR_BYTES))
        text = self._output.read().decode(errors="replace")
        _before, found, message = text.rpartition(_ERROR)
        return message.strip() if found else ""

    def terminate(self) -> None:
        """Ask it to end, without waiting."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Stop it within its time, or sooner if ``hurry`` returns True; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            stop_child(process, self._stop_s, hurry)
        output, self._output = self._output, None
        if output is not None:
            output.close()
