"""Reports the figures of a benchmark so far, in case it is cut off."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: Variable that names the file for what ``--json`` would print now.
OUT: Final = "TOKENYARD_BENCH_OUT"
#: Variable with a benchmark's time limit in seconds, unless its command line sets one.
LIMIT: Final = "TOKENYARD_BENCH_LIMIT_S"


def tell(line: str) -> None:
    """Print a line on standard error immediately."""
    print(line, file=sys.stderr, flush=True)


def save(figures: Mapping[str, Any]) -> None:
    """Write the figures atomically to the file that `OUT` names, if any."""
    if not os.environ.get(OUT):
        return
    path = Path(os.environ[OUT])
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(figures) + "\n")
    beside.replace(path)


def told(fault: BaseException) -> str:
    """A fault in words, with its type if the message says little."""
    words = str(fault).strip()
    return words if "\n" in words else f"{type(fault).__name__}: {words}"
