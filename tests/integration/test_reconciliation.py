"""What the roster shows of a worker while a controller brings it to its desired state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.pools import MEMORY, PlayedProcess, engine_info, play_processes
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.ops.control import SignalReceipt, Signals
from tokenyard.protocol.control import Order, model_scope
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import WorkerInfo
from worker.host.allocation import Goal
from worker.host.controller import Controller
from worker.host.membership import Membership
from worker.messages import (
    CommandRefused,
    Done,
    LoadModel,
    PauseEngine,
    Ready,
    ReloadWeights,
    Serve,
    SetEpoch,
    Warm,
)

STOP_S = 20.0
WAIT_S = 30.0
MODEL = model_scope("simulated")
RELOAD = Order(signal="RELOAD_WEIGHTS", scope=MODEL, weights="/gone")
EPOCH = Order(signal="SET_GENERATION_EPOCH", epoch=4)


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
def paused(signals: Signals) -> None:
    """A pause from before the controller starts."""
    signals.give(Order(signal="PAUSE"))


@pytest.fixture
def controller(broker: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    """The controller of one played process."""
    play_processes(monkeypatch)
    made = made_controller(broker, keys)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    made.stop()
    thread.join(STOP_S)
    assert not thread.is_alive()


def made_controller(broker: Server, keys: Keys, **settings: Any) -> Controller:
    """One that does not run yet."""
    settings |= {"engine": "simulated", "block_ms": 100}
    return Controller(WorkerSettings(redis_url=broker.url, yard=keys.yard, **settings))


def play(controller: Controller) -> PlayedProcess:
    """Wait for the controller's process."""
    process = eventually(lambda: controller._pool.members[0].process)
    assert isinstance(process, PlayedProcess)
    return process


def hears(process: PlayedProcess, kind: type) -> PlayedProcess:
    """Wait until the process gets a command of this kind."""
    eventually(lambda: any(isinstance(one, kind) for one in process.heard()))
    return process


def refuse_to_reload(process: PlayedProcess) -> None:
    hears(process, ReloadWeights).say(CommandRefused("no such folder", ReloadWeights("/gone")))


@pytest.fixture
def refusing(controller: Controller, signals: Signals) -> PlayedProcess:
    """The process of a paused worker that has refused to load other weights."""
    process = play(controller)
    process.say(Warm(MEMORY, {"import": 1.0}))
    spec = next(iter(controller._catalog.values()))
    hears(process, LoadModel).say(Ready(engine_info(spec), MEMORY))
    hears(process, Serve)
    paused = signals.give(Order(signal="PAUSE", scope=MODEL))
    hears(process, PauseEngine).say(Done(PauseEngine("abort")))
    assert reasons(signals, paused) == []
    given = signals.give(RELOAD)
    refuse_to_reload(process)
    assert reasons(signals, given) == ["no such folder"]
    return process


def reasons(signals: Signals, given: SignalReceipt) -> list[str]:
    """Why workers do not obey."""
    return [one.reason for one in signals.wait(given, WAIT_S)]


def test_a_paused_worker_is_never_shown_as_running(
    paused: None, shown: list[WorkerInfo], controller: Controller
) -> None:
    # Given a process that warms up
    eventually(lambda: shown)

    # If it is warm, and begins to load its model
    play(controller).say(Warm(MEMORY, {"import": 1.0}))
    eventually(lambda: shown[-1].state == "loading")

    # I expect each entry on the way to be that of a paused worker which has obeyed.
    assert {entry.state for entry in shown} == {"warming", "warm", "loading"}
    assert {(entry.run_state, bool(entry.obeyed)) for entry in shown} == {("PAUSED", True)}


def test_an_earlier_acknowledgement_is_no_answer_to_a_refused_signal(
    signals: Signals, refusing: PlayedProcess
) -> None:
    # Given a worker that has obeyed a signal after the one that it refuses
    epoch = signals.give(EPOCH)
    refuse_to_reload(refusing)
    hears(refusing, SetEpoch).say(Done(SetEpoch(4)))
    assert reasons(signals, epoch) == []

    # If the refused signal is given again
    again = signals.give(RELOAD)

    # I expect the worker to try it again, and the operator to learn that it refuses.
    assert not again.is_redundant
    refuse_to_reload(refusing)
    assert reasons(signals, again) == ["no such folder"]


def test_a_worker_that_refuses_a_signal_answers_a_later_one_after_a_signal_to_others(
    signals: Signals, refusing: PlayedProcess, connection: redis.Redis, keys: Keys
) -> None:
    # Given a worker that refuses one signal and has obeyed another, and a signal to others
    signals.give(EPOCH)
    refuse_to_reload(refusing)
    hears(refusing, SetEpoch).say(Done(SetEpoch(4)))
    others = signals.give(Order(signal="PAUSE", scope=model_scope("another")))
    refuse_to_reload(refusing)
    eventually(lambda: connection.exists(keys.acks(others.ids[0])))

    # If all get the same epoch once more
    again = signals.give(EPOCH)
    refuse_to_reload(refusing)

    # I expect it to answer.
    assert reasons(signals, again) == []


class TestLoadsThatEnd:
    """What the pool hears of a load whose process was killed, and what the host says of it."""

    @pytest.fixture
    def models(self, tmp_path: Path) -> Path:
        path = tmp_path / "models.toml"
        path.write_text("".join(f'[models.{one}]\npath = "{tmp_path}"\n' for one in ("a", "b")))
        return path

    def test_one_of_many_models_gives_way_and_counts_from_the_second_time(
        self, broker: Server, keys: Keys, models: Path
    ) -> None:
        controller = made_controller(broker, keys, models=models)
        goal = Goal(controller._catalog["a"], (0,))
        told = []
        for _ in range(2):
            is_tried_again = controller.failed(goal, "ended by SIGKILL", is_lost=True)
            told.append((is_tried_again, controller._host.info.models[0].fault))

        assert told == [(False, ""), (False, "ended by SIGKILL")]

    def test_the_only_model_is_tried_again(self, broker: Server, keys: Keys) -> None:
        controller = made_controller(broker, keys)
        [spec] = controller._catalog.values()

        assert controller.failed(Goal(spec, (0,)), "out of memory")
