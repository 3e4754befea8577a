"""The next order for a process, from the desired state and its own."""

from __future__ import annotations

from typing import Any

import pytest

from tokenyard.protocol.control import PAUSE_MODES, DesiredState, PauseMode
from worker.host.process_state import ObservedState, is_fit, next_step, why_not
from worker.messages import EngineCommand, PauseEngine, ReloadWeights, SetEpoch, UnpauseEngine


def wanted(**values: Any) -> DesiredState:
    return DesiredState(**values)


def paused(mode: PauseMode = "abort", **values: Any) -> DesiredState:
    return DesiredState(run_state="PAUSED", mode=mode, **values)


def walk(desired_state: DesiredState, observed: ObservedState) -> list[EngineCommand]:
    """All orders for a process that obeys each of them."""
    told: list[EngineCommand] = []
    while (step := next_step(desired_state, observed)) is not None:
        observed.asked = step
        told.append(step)
        observed.did(step)
        assert len(told) < 10
    assert is_fit(desired_state, observed)
    return told


@pytest.mark.parametrize(
    ("desired_state", "observed", "told"),
    [
        (wanted(), ObservedState(), []),
        (paused("keep"), ObservedState(), [PauseEngine("keep")]),
        (paused("keep"), ObservedState(paused="keep"), []),
        (paused("abort"), ObservedState(paused="keep"), [PauseEngine("abort")]),
        (DesiredState(run_state="SUSPENDED", mode="wait"), ObservedState(), [PauseEngine("wait")]),
        (wanted(), ObservedState(paused="wait"), [UnpauseEngine()]),
        (wanted(epoch=4), ObservedState(epoch=3), [SetEpoch(4)]),
        (wanted(), ObservedState(epoch=3), [SetEpoch(None)]),
        (paused(weights="/w"), ObservedState(paused="abort"), [ReloadWeights("/w")]),
        # Results must have the right epoch and weights.
        (
            wanted(weights="/w", epoch=4),
            ObservedState(paused="keep"),
            [PauseEngine("abort"), ReloadWeights("/w"), SetEpoch(4), UnpauseEngine()],
        ),
        (
            wanted(weights="/w"),
            ObservedState(),
            [PauseEngine("abort"), ReloadWeights("/w"), UnpauseEngine()],
        ),
        (
            wanted(),
            ObservedState(weights="/w"),
            [PauseEngine("abort"), ReloadWeights(""), UnpauseEngine()],
        ),
    ],
)
def test_the_orders_lead_to_the_desired_state(
    desired_state: DesiredState, observed: ObservedState, told: list[EngineCommand]
) -> None:
    assert walk(desired_state, observed) == told


@pytest.mark.parametrize("errand", [SetEpoch(3), ReloadWeights("/w"), UnpauseEngine()])
def test_one_order_at_a_time_is_given(errand: EngineCommand) -> None:
    observed = ObservedState(asked=errand)

    assert next_step(paused(), observed) is None
    assert not is_fit(paused(), observed)


class TestSlowPause:
    def test_the_pause_is_waited_for(self) -> None:
        assert next_step(paused("wait"), ObservedState(asked=PauseEngine("wait"))) is None

    @pytest.mark.parametrize("mode", ["abort", "keep"])
    def test_another_mode_replaces_it(self, mode: PauseMode) -> None:
        assert next_step(paused(mode), ObservedState(asked=PauseEngine("wait"))) == PauseEngine(
            mode
        )

    def test_the_pause_may_be_taken_back(self) -> None:
        observed = ObservedState(asked=PauseEngine("wait"))
        assert next_step(wanted(epoch=3), observed) == UnpauseEngine()

        # A report of the pause from before it got the new order is void.
        observed.asked = UnpauseEngine()
        observed.did(PauseEngine("wait"))
        assert observed.asked == UnpauseEngine()
        observed.did(UnpauseEngine())
        assert observed.asked is None
        assert observed.paused is None


class TestRefusedOrders:
    def test_the_other_orders_are_given(self) -> None:
        observed = ObservedState(paused="abort", asked=ReloadWeights("/gone"))
        observed.cannot(ReloadWeights("/gone"), "no such folder")

        assert walk(paused(weights="/gone"), observed) == []
        assert walk(paused("keep", weights="/gone"), observed) == [PauseEngine("keep")]
        assert why_not(paused(weights="/gone"), observed) == "no such folder"
        assert why_not(paused(), observed) == ""

    def test_a_process_without_its_weights_does_not_run(self) -> None:
        desired_state = wanted(weights="/gone", epoch=3)
        observed = ObservedState(paused="abort", asked=ReloadWeights("/gone"))
        observed.cannot(ReloadWeights("/gone"), "no such folder")

        assert walk(desired_state, observed) == [SetEpoch(3)]
        assert observed.paused == "abort"
        assert why_not(desired_state, observed) == "no such folder"

        assert walk(wanted(), observed) == [SetEpoch(None), UnpauseEngine()]

    def test_a_refused_order_is_repeated_only_with_the_next_signal(self) -> None:
        observed = ObservedState(paused="abort")
        observed.reset_refusals("1-0")
        observed.asked = ReloadWeights("/gone")
        observed.cannot(ReloadWeights("/gone"), "no such folder")

        observed.reset_refusals("1-0")
        assert next_step(paused(weights="/gone"), observed) is None
        observed.reset_refusals("2-0")
        assert next_step(paused(weights="/gone"), observed) == ReloadWeights("/gone")


def test_answers_to_other_orders_are_ignored() -> None:
    observed = ObservedState(asked=SetEpoch(3))

    observed.did(SetEpoch(2))
    observed.did(ReloadWeights("/w"))
    observed.cannot(ReloadWeights("/w"), "no such folder")
    for mode in PAUSE_MODES:
        observed.did(PauseEngine(mode))

    assert observed == ObservedState(asked=SetEpoch(3))
