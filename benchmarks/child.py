"""Runs a part of a benchmark in its own interpreter, which writes a report when it ends.

So the engines' standard output does not mix with the benchmark's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.yard import last_lines
from tokenyard.process.children import start_child, stop_child

TIMEOUT_S: Final = 300.0
_STOP_S: Final = 10.0


def run_child(
    module: str,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Run a module; returns the JSON that it writes to the file in its last argument.

    Raises `ChildProcessError` with the end of its log, or `subprocess.TimeoutExpired`.
    """
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        log, report = Path(folder) / "log", Path(folder) / "report.json"
        command = [sys.executable, "-m", module, *arguments, str(report)]
        process = start_child(command, log, env={**os.environ, **(environment or {})})
        try:
            status = process.wait(timeout_s)
        finally:
            stop_child(process, _STOP_S)
        if status:
            words = last_lines(log.read_text(errors="replace"))
            raise ChildProcessError(f"{module} ended with status {status}:\n{words}")
        return json.loads(report.read_text())
