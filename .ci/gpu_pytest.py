"""A pytest plugin that prints each outcome immediately, because a part may be ended."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the reporter."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    config.pluginmanager.register(_AtOnce(terminal), "at-once")


class _AtOnce:
    """Prints the outcome of each test when it ends, with the traceback of a failure."""

    def __init__(self, terminal: pytest.TerminalReporter | None) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report setup, call and teardown of each test."""
        if self._terminal is None or (report.passed and report.when != "call"):
            return
        step = "" if report.when == "call" else f" in {report.when}"
        self._terminal.write_line("")
        self._terminal.write_line(
            f"{report.outcome}{step} after {report.duration:.1f} s: {report.nodeid}"
        )
        if report.failed:
            self._terminal.write_line(report.longreprtext)
        self._terminal.flush()
