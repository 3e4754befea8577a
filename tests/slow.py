"""Tests that may take more than 20 s, or start a vLLM of their own: which, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: In `make test`; at most five.
GATE: Final[Mapping[str, str]] = {
    "tests/conftest.py::stand": "starts the one yard with vLLM, which serves all tests of vLLM",
    "tests/test_wheel.py::test_wheel_alone_with_its_base_dependencies_gives_a_client": (
        "builds a virtual environment and installs into it"
    ),
}
