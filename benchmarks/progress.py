"""What a benchmark has found so far, for whoever has to cut it off."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: The file that holds what ``--json`` would print now.
OUT: Final = "TOKENYARD_BENCH_OUT"
#: Seconds that a benchmark has, where its command line does not say it.
LIMIT: Final = "TOKENYARD_BENCH_LIMIT_S"


def tell(line: str) -> None:
    """A line on standard error, at once."""
    print(line, file=sys.stderr, flush=True)


def save(figures: Mapping[str, Any]) -> None:
    """Write the figures to the file that `OUT` names, if it names one; all of them or none."""
    if not os.environ.get(OUT):
        return
    path = Path(os.environ[OUT])
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(figures) + "\n")
    beside.replace(path)


def told(fault: BaseException) -> str:
    """A fault in words, with its kind where it says little."""
    words = str(fault).strip()
    return words if "\n" in words else f"{type(fault).__name__}: {words}"
