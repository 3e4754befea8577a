"""Programs that tests fork are those that users start."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.process.program import Exit


@pytest.fixture
def plant(valkey_broker: Server) -> Plant:
    return Plant(valkey_broker.url)


def test_exit_statuses_and_messages_arrive(plant: Plant) -> None:
    with plant:
        wrong = plant.coordinator(lease_ms=1)
        assert wrong.wait() == Exit.USAGE
        assert "lease_ms: must be at least 500" in wrong.log

        killed, stopped = plant.coordinator(name="a"), plant.coordinator(name="b")
        plant.wait_for_leader()
        eventually(lambda: "stands by" in stopped.log or "leads as" in stopped.log)
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert not killed.is_running
        assert stopped.is_running
        assert stopped.stop() == 0


def test_ctrl_c_ends_one(plant: Plant) -> None:
    with plant:
        coordinator = plant.coordinator()
        plant.wait_for_leader()
        coordinator.signal(signal.SIGINT)
        assert coordinator.wait() == 0


def test_one_has_its_own_title_and_the_variables_of_its_test(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plant:
        monkeypatch.setenv("TOKENYARD_COORDINATOR_NAME", "by-variable")
        coordinator = plant.coordinator()
        assert b"by-variable" in plant.wait_for_leader()
        assert psutil.Process(coordinator.pid).cmdline()[0].startswith("tokenyard coordinator")
