"""Commands that change the engine of a loop: sleep, wake, reload."""

from __future__ import annotations

import pytest

from tests.support.loop_rig import MEMORY, LoopRig
from worker.engines.simulated.backend import SimulatedBackend
from worker.engines.simulated.engine import BROKEN
from worker.messages import Asleep, CommandRefused, Done, Ready, ReloadWeights, Sleep, Wake
from worker.models import ModelSpec


@pytest.fixture
def rig() -> LoopRig:
    """A rig with a simulated engine."""
    return LoopRig(SimulatedBackend().load(ModelSpec(name="sim", path="sim")))


def test_the_engine_sleeps_and_wakes(rig: LoopRig) -> None:
    rig.say(Sleep(1))
    rig.say(Wake())

    asleep, ready = rig.told
    assert isinstance(asleep, Asleep)
    assert asleep.seconds >= 0.0
    assert asleep.memory == MEMORY
    assert isinstance(ready, Ready)
    assert ready.info.model == "sim"
    assert set(ready.info.phases_s) == {"wake"}, "it was not loaded"


def test_an_unsupported_operation_is_refused(rig: LoopRig) -> None:
    rig.say(Sleep(7))
    rig.say(ReloadWeights(BROKEN))

    sleep, reload = rig.told
    assert isinstance(sleep, CommandRefused)
    assert "no sleep level 7" in sleep.reason
    assert isinstance(reload, CommandRefused)
    assert "broken weights" in reload.reason
    assert (sleep.errand, reload.errand) == (None, ReloadWeights(BROKEN))


def test_a_reload_reaches_the_engine(rig: LoopRig) -> None:
    rig.say(ReloadWeights("/step-2"))

    assert rig.engine.info.weights == "/step-2"
    assert rig.told == [Done(ReloadWeights("/step-2"))]


def test_a_fault_is_not_a_refusal(rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process: the state of the engine is unknown."""

    def wake() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(rig.engine, "wake", wake)
    with pytest.raises(RuntimeError):
        rig.say(Wake())
    assert rig.told == []
