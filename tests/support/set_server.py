"""A server whose clock the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.support.absence import lacks
from tests.support.servers import Server, find_binary

_LIBRARY: Final = "*/faketime/libfaketime.so.1"


class SetServer(Server):
    """Valkey with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        binary = find_binary("valkey")
        library = next(Path("/usr/lib").glob(_LIBRARY), None)
        if binary is None or library is None:
            lacks("libfaketime is missing (Debian: apt install libfaketime): no clock was set")
        super().__init__("valkey", binary, folder, aof=True)
        self._file = folder / "clock"
        self.set_clock(0.0)
        variables = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": self._file,
            "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
        }
        words = [f"{name}={value}" for name, value in variables.items()]
        self._command = ["env", *words, *self._command]

    def set_clock(self, ahead_s: float) -> None:
        """Set its clock, compared with ours."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+.3f}\n")
        new.rename(self._file)
