"""What the roster shows of a worker while a controller brings it to its desired state."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import pytest
import redis

import worker.host.process_handle
from tests.support.pools import MEMORY, PlayedProcess
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.admin.signals import Signals
from tokenyard.protocol.control import Order
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import WorkerInfo
from worker.host.controller import Controller
from worker.host.membership import Membership
from worker.messages import Warm

STOP_S = 20.0


class PlayedServer:
    """Starts processes that the test plays."""

    Pipe = staticmethod(multiprocessing.Pipe)
    Process = PlayedProcess


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[WorkerInfo]:
    """Every roster entry, also one that another replaces before it is written."""
    seen: list[WorkerInfo] = []
    join, show = Membership.join, Membership.show

    def joined(self: Membership, entry: WorkerInfo) -> str:
        seen.append(entry)
        return join(self, entry)

    def changed(self: Membership, name: str, entry: WorkerInfo) -> None:
        seen.append(entry)
        show(self, name, entry)

    monkeypatch.setattr(Membership, "join", joined)
    monkeypatch.setattr(Membership, "show", changed)
    return seen


@pytest.fixture
def controller(
    broker: Server, keys: Keys, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Controller]:
    """The controller of one played process, in a yard that was paused before."""
    Signals(connection, keys).give(Order(signal="PAUSE"))
    monkeypatch.setattr(worker.host.process_handle, "_server", PlayedServer)
    monkeypatch.setattr("worker.host.pool.preload", lambda modules: None)
    made = Controller(
        WorkerSettings(redis_url=broker.url, yard=keys.yard, engine="simulated", block_ms=100)
    )
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    made.stop()
    thread.join(STOP_S)
    assert not thread.is_alive()


def test_a_paused_worker_is_never_shown_as_running(
    shown: list[WorkerInfo], controller: Controller
) -> None:
    # Given a process that warms up
    eventually(lambda: shown)
    (member,) = controller._pool.members
    process = member.process
    assert isinstance(process, PlayedProcess)

    # If it is warm, and begins to load its model
    process.say(Warm(MEMORY, {"import": 1.0}))
    eventually(lambda: shown[-1].state == "loading")

    # I expect each entry on the way to be that of a paused worker which has obeyed.
    assert {entry.state for entry in shown} == {"warming", "warm", "loading"}
    assert {(entry.run_state, bool(entry.obeyed)) for entry in shown} == {("PAUSED", True)}
