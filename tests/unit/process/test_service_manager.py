"""What a service manager hears."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenyard.process.service_manager import ServiceManager


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[socket.socket]:
    """A service manager's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def heard(ear: socket.socket) -> list[str]:
    """Everything since the last time."""
    found = []
    while True:
        try:
            found.append(ear.recv(100).decode())
        except BlockingIOError:
            return found


def manager(ear: socket.socket, watchdog_us: str = "") -> ServiceManager:
    named = {"NOTIFY_SOCKET": str(ear.getsockname())}
    return ServiceManager({**named, "WATCHDOG_USEC": watchdog_us} if watchdog_us else named)


def test_ready_and_stopping_are_each_notified_once(ear: socket.socket) -> None:
    told = manager(ear)
    for _ in range(3):
        told.alive()
    told.stopping()

    assert heard(ear) == ["READY=1", "STOPPING=1"]


def test_a_watchdog_hears_again_and_again_but_not_more_often_than_it_needs(
    ear: socket.socket,
) -> None:
    eager, patient = manager(ear, "1"), manager(ear, str(3600 * 10**6))
    for _ in range(3):
        eager.alive()
    assert heard(ear) == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]

    for _ in range(3):
        patient.alive()
    assert heard(ear) == ["READY=1"]


def test_an_abstract_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        name = f"tokenyard-{tmp_path.name}-{id(tmp_path)}"
        listening.bind("\0" + name)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).alive()
        assert listening.recv(100) == b"READY=1"


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        told = ServiceManager(environment)
        told.alive()
        told.stopping()
