"""Reports when the model of the protocol was not checked."""

from __future__ import annotations

import shutil

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if shutil.which("spin") is None:
        terminalreporter.section("THE MODEL OF THE PROTOCOL WAS NOT CHECKED", red=True, bold=True)
        terminalreporter.line("Install spin (Debian: apt install spin).")
