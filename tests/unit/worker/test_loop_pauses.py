"""The engine loop while operators have paused it, and commands that change its engine."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request
from tests.support.fake_clock import FakeClock
from tests.support.loop_rig import LoopRig, finished
from tests.support.waiting import eventually
from tokenyard.protocol.control import PauseMode
from worker.engines import TokenDelta
from worker.engines.simulated.backend import SimulatedBackend
from worker.engines.simulated.engine import BROKEN
from worker.messages import (
    AbortRequests,
    CommandRefused,
    Done,
    Drain,
    Drained,
    LaneReleased,
    PauseEngine,
    ReloadWeights,
    Serve,
    SetEpoch,
    Sleep,
    UnpauseEngine,
    Wake,
)
from worker.models import ModelSpec
from worker.process.outcomes import Expired


@pytest.fixture
def rig() -> LoopRig:
    """A rig with one running request."""
    made = LoopRig()
    made.deliver("1-0")
    made.engine.steps = [[TokenDelta("1-0", 0, [5])]]
    made.turn()
    return made


class TestKeep:
    def test_the_engine_does_not_step(self, rig: LoopRig) -> None:
        rig.say(PauseEngine("keep"))
        steps = rig.loop.steps
        rig.bring("2-0")

        assert rig.told == [Done(PauseEngine("keep"))]
        assert rig.loop.steps == steps
        assert rig.engine.has == ["1-0"], "nothing new is begun"
        assert rig.loop.unfinished == 0, "nobody may think that it hangs"
        assert list(rig.sessions[0].runs) == ["1-0", "2-0"]

        rig.say(UnpauseEngine())
        assert rig.told[-1] == Done(UnpauseEngine())
        assert rig.engine.has == ["1-0", "2-0"]
        assert rig.loop.steps == steps + 1
        assert rig.loop.unfinished == 2

    def test_a_kept_request_may_be_cancelled(self, rig: LoopRig) -> None:
        rig.say(PauseEngine("keep"))
        rig.bring("2-0")

        rig.say(AbortRequests("w.1", ["2-0"]))
        rig.say(UnpauseEngine())

        assert rig.engine.has == ["1-0"]

    def test_a_drain_does_not_wait_for_kept_requests(self, rig: LoopRig) -> None:
        rig.say(PauseEngine("keep"), Drain())

        assert rig.told == [Done(PauseEngine("keep")), Drained()]

    def test_a_waiting_request_gets_the_epoch_in_which_it_begins(self, rig: LoopRig) -> None:
        rig.say(PauseEngine("keep"))
        rig.bring("2-0")
        rig.say(SetEpoch(4), UnpauseEngine())

        assert [run.epoch for run in rig.sessions[0].runs.values()] == [None, 4]


class TestWait:
    def test_running_requests_finish(self, rig: LoopRig) -> None:
        rig.engine.steps = [[TokenDelta("1-0", 0, [6])], [finished("1-0", [5, 6, 7])]]
        rig.say(PauseEngine("wait"))
        assert rig.told == []

        rig.turn()
        rig.turn()

        assert rig.sessions[0].given[-1] == finished("1-0", [5, 6, 7])
        assert rig.told == [Done(PauseEngine("wait"))]
        assert rig.sessions[0].running, "it keeps its lane"

    def test_requests_that_arrive_meanwhile_are_given_up_at_the_end(self, rig: LoopRig) -> None:
        rig.engine.steps = [[], [finished("1-0", [5])]]
        rig.say(PauseEngine("wait"))
        rig.bring("2-0")
        rig.turn()

        assert rig.told == [Done(PauseEngine("wait")), LaneReleased("w.1")]
        assert not rig.sessions[0].running

    def test_requests_that_arrive_meanwhile_begin_if_the_pause_is_taken_back(
        self, rig: LoopRig
    ) -> None:
        rig.say(PauseEngine("wait"))
        rig.bring("2-0")
        rig.say(UnpauseEngine())

        assert rig.told == [Done(UnpauseEngine())]
        assert rig.engine.has == ["1-0", "2-0"]


class TestAbort:
    def test_running_requests_are_given_up(self, rig: LoopRig) -> None:
        rig.say(PauseEngine("abort"))

        assert rig.told == [LaneReleased("w.1"), Done(PauseEngine("abort"))]
        assert rig.engine.aborted == ["1-0"]
        assert not rig.sessions[0].running

    def test_an_idle_worker_keeps_its_lane(self) -> None:
        rig = LoopRig()
        rig.say(PauseEngine("abort"))

        assert rig.told == [Done(PauseEngine("abort"))]
        assert rig.sessions[0].running

    @pytest.mark.parametrize("mode", ["abort", "wait"])
    def test_a_request_that_slips_through_is_given_up(self, mode: PauseMode) -> None:
        rig = LoopRig()
        rig.say(PauseEngine(mode))
        rig.turn()
        rig.deliver("2-0")
        rig.deliver("3-0")
        rig.turn()

        assert rig.told == [Done(PauseEngine(mode)), LaneReleased("w.1")]
        assert rig.engine.has == []

        # Under another name it is paused as before, and continues when it may.
        rig.say(Serve("w.2"))
        rig.bring("2-0", "w.2")
        assert rig.told[-1] == LaneReleased("w.2")
        rig.say(Serve("w.3"), UnpauseEngine())
        rig.bring("4-0", "w.3")
        assert rig.engine.has == ["4-0"]

    def test_kept_requests_may_be_given_up_later(self, rig: LoopRig) -> None:
        rig.say(PauseEngine("keep"))
        rig.say(PauseEngine("abort"))

        assert rig.told == [
            Done(PauseEngine("keep")),
            LaneReleased("w.1"),
            Done(PauseEngine("abort")),
        ]


def test_each_step_is_published_with_the_epoch(rig: LoopRig) -> None:
    rig.say(SetEpoch(3))
    rig.say(Serve("w.2"))
    rig.deliver("2-0", worker="w.2")
    rig.engine.steps = [[TokenDelta("2-0", 0, [5])]]
    rig.turn()

    assert rig.told == [Done(SetEpoch(3))]
    assert [session.epochs for session in rig.sessions] == [[None], [3]]


def test_deadlines_apply_during_a_pause(fake_clock: FakeClock, rig: LoopRig) -> None:
    # Given a kept request and one that waits behind it
    late_ms = int((fake_clock.wall() + 3600) * 1000)
    rig.bring("2-0", request=make_request(deadline_ms=late_ms))
    rig.say(PauseEngine("keep"))
    rig.bring("3-0", request=make_request(deadline_ms=late_ms))

    # If their deadlines pass
    fake_clock.advance(2 * 3600.0)
    eventually(lambda: (rig.turn(), len(rig.sessions[0].given) == 3)[1])

    # I expect both to end, and what runs without one to go on.
    given = rig.sessions[0].given
    assert {one.key for one in given if isinstance(one, Expired)} == {"2-0", "3-0"}
    rig.say(UnpauseEngine())
    assert rig.engine.has == ["1-0"]


class TestChanges:
    @pytest.fixture
    def rig(self) -> LoopRig:
        """A rig with a simulated engine."""
        return LoopRig(SimulatedBackend().load(ModelSpec(name="sim", path="sim")))

    def test_an_unsupported_operation_is_refused(self, rig: LoopRig) -> None:
        rig.say(Sleep(7))
        rig.say(ReloadWeights(BROKEN))

        sleep, reload = rig.told
        assert isinstance(sleep, CommandRefused)
        assert "no sleep level 7" in sleep.reason
        assert isinstance(reload, CommandRefused)
        assert "broken weights" in reload.reason
        assert (sleep.errand, reload.errand) == (None, ReloadWeights(BROKEN))

    def test_a_fault_is_not_a_refusal(self, rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
        """It ends the process: the state of the engine is unknown."""

        def wake() -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(rig.engine, "wake", wake)
        with pytest.raises(RuntimeError):
            rig.say(Wake())
        assert rig.told == []
