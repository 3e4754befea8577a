"""Commands that change the engine of a loop: sleep, wake, reload."""

from __future__ import annotations

import queue

import pytest

from worker.engines import Engine
from worker.engines.simulated.backend import SimulatedBackend
from worker.engines.simulated.engine import BROKEN
from worker.messages import (
    Asleep,
    CommandRefused,
    Done,
    Ready,
    ReloadWeights,
    Sleep,
    ToController,
    ToProcess,
    Wake,
)
from worker.models import ModelSpec
from worker.process.lane_session import PipeLaneSession
from worker.process.loop import EngineLoop
from worker.process.recent_results import RecentResults


class Ward:
    """An engine with its control."""

    def __init__(self) -> None:
        self.told: list[ToController] = []
        self.backend = SimulatedBackend()
        self.engine: Engine = self.backend.load(ModelSpec(name="sim", path="sim"))
        self.loop = EngineLoop(
            self.engine,
            queue.SimpleQueue(),
            lambda _: PipeLaneSession(self.engine.info, self.told.append),
            self.backend.memory,
            self.told.append,
            RecentResults(),
        )

    def care(self, command: ToProcess) -> None:
        """Run a command."""
        self.loop.inbox.put(command)
        self.loop.run_once()


@pytest.fixture
def ward() -> Ward:
    return Ward()


def test_the_engine_sleeps_and_wakes(ward: Ward) -> None:
    ward.care(Sleep(1))
    ward.care(Wake())

    asleep, ready = ward.told
    assert isinstance(asleep, Asleep)
    assert asleep.seconds >= 0.0
    assert asleep.memory == ward.backend.memory()
    assert isinstance(ready, Ready)
    assert ready.info.model == "sim"
    assert set(ready.info.phases_s) == {"wake"}, "it was not loaded"


def test_an_unsupported_operation_is_refused(ward: Ward) -> None:
    ward.care(Sleep(7))
    ward.care(ReloadWeights(BROKEN))

    sleep, reload = ward.told
    assert isinstance(sleep, CommandRefused)
    assert "no sleep level 7" in sleep.reason
    assert isinstance(reload, CommandRefused)
    assert "broken weights" in reload.reason
    assert (sleep.errand, reload.errand) == (None, ReloadWeights(BROKEN))


def test_a_reload_reaches_the_engine(ward: Ward) -> None:
    ward.care(ReloadWeights("/step-2"))

    assert ward.engine.info.weights == "/step-2"
    assert ward.told == [Done(ReloadWeights("/step-2"))]


def test_a_fault_is_not_a_refusal(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process: the state of the engine is unknown."""

    def wake() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(ward.engine, "wake", wake)
    with pytest.raises(RuntimeError):
        ward.care(Wake())
    assert ward.told == []
