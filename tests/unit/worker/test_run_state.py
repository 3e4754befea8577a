"""What a process is told next, from what is wanted and what it does."""

from __future__ import annotations

from typing import Any

import pytest

from tokenyard.protocol.control import PAUSE_MODES, PauseMode, Posture
from worker.host.run_state import Ask, Bearing, is_fit, next_step, why_not
from worker.messages import Errand, Pause, Profile, Reload, SetEpoch, Unpause


def wanted(**values: Any) -> Posture:
    return Posture(**values)


def paused(mode: PauseMode = "abort", **values: Any) -> Posture:
    return Posture(conduct="PAUSED", mode=mode, **values)


def walk(posture: Posture, bearing: Bearing) -> list[Ask]:
    """All that a process is told that does what it is told."""
    told: list[Ask] = []
    while (step := next_step(posture, bearing)) is not None:
        bearing.asked = step
        told.append(step)
        if isinstance(step, Pause):
            bearing.rests(step.mode)
        else:
            assert bearing.has_done(step)
        assert len(told) < 10
    assert is_fit(posture, bearing)
    return told


@pytest.mark.parametrize(
    ("posture", "bearing", "told"),
    [
        (wanted(), Bearing(), []),
        (paused("keep"), Bearing(), [Pause("keep")]),
        (paused("keep"), Bearing(paused="keep"), []),
        (paused("abort"), Bearing(paused="keep"), [Pause("abort")]),
        (Posture(conduct="SUSPENDED", mode="wait"), Bearing(), [Pause("wait")]),
        (wanted(), Bearing(paused="wait"), [Unpause()]),
        (wanted(epoch=4), Bearing(epoch=3), [SetEpoch(4)]),
        (wanted(), Bearing(epoch=3), [SetEpoch(None)]),
        (wanted(profiling=True), Bearing(), [Profile(True)]),
        (wanted(), Bearing(profiling=True), [Profile(False)]),
        (paused(weights="/w"), Bearing(paused="abort"), [Reload("/w")]),
        # Results must tell their epoch and weights truly.
        (
            wanted(weights="/w", epoch=4),
            Bearing(paused="keep"),
            [Pause("abort"), Reload("/w"), SetEpoch(4), Unpause()],
        ),
        (wanted(weights="/w"), Bearing(), [Pause("abort"), Reload("/w"), Unpause()]),
        (wanted(), Bearing(weights="/w"), [Pause("abort"), Reload(""), Unpause()]),
    ],
)
def test_what_it_is_told(posture: Posture, bearing: Bearing, told: list[Ask]) -> None:
    assert walk(posture, bearing) == told


@pytest.mark.parametrize("errand", [SetEpoch(3), Profile(True), Reload("/w"), Unpause()])
def test_one_thing_at_a_time(errand: Errand) -> None:
    bearing = Bearing(asked=errand)

    assert next_step(paused(), bearing) is None
    assert not is_fit(paused(), bearing)


class TestAPauseThatTakesLong:
    def test_it_is_waited_for(self) -> None:
        assert next_step(paused("wait"), Bearing(asked=Pause("wait"))) is None

    @pytest.mark.parametrize("mode", ["abort", "keep"])
    def test_another_mode_comes_in_its_place(self, mode: PauseMode) -> None:
        assert next_step(paused(mode), Bearing(asked=Pause("wait"))) == Pause(mode)

    def test_it_may_be_taken_back(self) -> None:
        bearing = Bearing(asked=Pause("wait"))
        assert next_step(wanted(epoch=3), bearing) == Unpause()

        # What it says of the pause, because it did not know yet, is void.
        bearing.asked = Unpause()
        bearing.rests("wait")
        assert bearing.asked == Unpause()
        assert bearing.has_done(Unpause())
        assert bearing.paused is None


class TestWhatItCannotDo:
    def test_the_rest_is_done(self) -> None:
        bearing = Bearing(asked=Profile(True))
        assert bearing.cannot(Profile(True), "no profiler")

        assert walk(wanted(profiling=True), bearing) == []
        assert walk(paused("keep", profiling=True), bearing) == [Pause("keep")]
        assert why_not(wanted(profiling=True), bearing) == "no profiler"
        assert why_not(wanted(), bearing) == ""

    def test_without_its_weights_it_does_not_run(self) -> None:
        posture = wanted(weights="/gone", epoch=3)
        bearing = Bearing(paused="abort", asked=Reload("/gone"))
        bearing.cannot(Reload("/gone"), "no such folder")

        assert walk(posture, bearing) == [SetEpoch(3)]
        assert bearing.paused == "abort"
        assert why_not(posture, bearing) == "no such folder"

        assert walk(wanted(), bearing) == [SetEpoch(None), Unpause()]

    def test_it_is_asked_again_with_the_next_signal_only(self) -> None:
        bearing = Bearing()
        bearing.judge_anew("1-0")
        bearing.asked = Profile(True)
        bearing.cannot(Profile(True), "no profiler")

        bearing.judge_anew("1-0")
        assert next_step(wanted(profiling=True), bearing) is None
        bearing.judge_anew("2-0")
        assert next_step(wanted(profiling=True), bearing) == Profile(True)


def test_answers_to_others_are_not_its_own() -> None:
    bearing = Bearing(asked=SetEpoch(3))

    assert not bearing.has_done(SetEpoch(2))
    assert not bearing.has_done(Profile(True))
    assert not bearing.cannot(Profile(True), "no profiler")
    for mode in PAUSE_MODES:
        bearing.rests(mode)

    assert bearing == Bearing(asked=SetEpoch(3))
