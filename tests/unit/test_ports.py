"""Ports of tests: no two tests that run at once get the same one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import servers
from tests.support.servers import free_port

ASK = "from tests.support import servers; servers._PORTS = range({0}, {0} + 1); servers.free_port()"


def test_a_port_is_given_once_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(servers, "_PORTS", range(port, port + 1))

    with pytest.raises(AssertionError, match="every port is in use"):
        free_port()
    ask = [sys.executable, "-c", ASK.format(port)]
    other = subprocess.run(ask, check=False, capture_output=True, text=True)

    assert "every port is in use" in other.stderr
