"""Every cell of the table of signals, while one worker joins late and another is killed.

Three hosts, each with one worker, have requests that run and requests that wait. One of them is
frozen before the signal, so that it cannot obey before it is killed; a fourth one
joins after the signal. No token may be lost or repeated, all hosts must reach the desired state of
the table, and a waiting caller must learn which worker is missing, for as long as it is.
"""

from __future__ import annotations

import os
import signal as signals_of_the_system
from itertools import product
from typing import Any

import msgspec
import pytest

from tests.crash.signal_yard import BOUND_S, NEW, Cast, workers
from tests.support.processes import Plant
from tests.support.streams import expected, wait_mid_stream
from tests.support.waiting import eventually
from tokenyard.ops.control import SignalReceipt
from tokenyard.protocol.control import (
    ALL,
    RUN_STATES,
    SIGNALS,
    DesiredState,
    Invalid,
    Order,
    RunState,
    Signal,
    after,
    model_scope,
)
from worker.engines.simulated.engine import BROKEN

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]

WAYS: dict[RunState, tuple[Signal, ...]] = {
    "RUNNING": (),
    "PAUSED": ("PAUSE",),
    "SUSPENDED": ("PAUSE", "SUSPEND"),
}
ENDS = {"DRAIN", "STOP"}


def start(plant: Plant, signal: Signal, run_state: RunState) -> Cast:
    """Start three workers in a run state, with requests that run and requests that wait."""
    is_for_model = (signal, run_state) == ("RELOAD_WEIGHTS", "PAUSED")
    cast = Cast(plant, model_scope("sim") if is_for_model else ALL)
    running = cast.ask(12)[:3]
    wait_mid_stream(plant, running)
    cast.tell(*WAYS[run_state])
    cast.are_in(cast.desired_state(), "abc")
    return cast


def cells(kind: str) -> list[tuple[Signal, RunState]]:
    """Cells of the table in which a signal is valid, redundant or invalid."""
    found = []
    for signal in SIGNALS:
        for run_state in RUN_STATES:
            begin = DesiredState(run_state=run_state)
            order = Order(signal=signal, scope=model_scope("sim"), epoch=7, weights=NEW)
            try:
                is_new = after(begin, order) != begin or signal in ENDS
            except Invalid:
                is_kind = kind == "invalid"
            else:
                is_kind = kind == ("valid" if is_new else "redundant")
            if is_kind:
                found.append((signal, run_state))
    return found


def test_each_cell_is_of_one_kind() -> None:
    kinds = [cells(kind) for kind in ("valid", "redundant", "invalid")]
    assert sum(map(len, kinds)) == len(SIGNALS) * len(RUN_STATES)
    assert all(kinds)


def running_first(cells: list[tuple[Signal, RunState]]) -> list[Any]:
    """Cells as parameters; each costs a yard, so all but those of running workers are `long`."""
    return [
        pytest.param(*cell, marks=[] if cell[1] == "RUNNING" else [pytest.mark.long])
        for cell in cells
    ]


VALID = [cell for cell in cells("valid") if cell[0] not in ENDS]


@pytest.mark.long
@pytest.mark.parametrize(("signal", "run_state"), running_first(VALID))
def test_a_valid_signal_brings_all_workers_to_the_new_state(
    plant: Plant, signal: Signal, run_state: RunState
) -> None:
    # Given three workers, one of which is frozen
    cast = start(plant, signal, run_state)
    victim = cast.freeze("b")

    # If a signal is given, and a fourth joins,
    expected_state = after(cast.desired_state(), cast.order(signal))
    given = cast.signals.give(cast.order(signal))
    assert not given.is_redundant
    cast.enter("d")
    cast.ask(4)

    # I expect the others to obey, and the wait to name the frozen one,
    assert only(cast, given, victim)
    # and after its death to last only until its lease expires.
    cast.kill("b")
    assert workers(cast.signals.wait(given, 0.0)) == [victim]
    plant.end_leases("b")
    assert cast.signals.wait(given, BOUND_S) == []

    # I expect all workers, also the late and the returned one, to be in the desired state,
    cast.enter("b")
    cast.are_in(expected_state, "abcd")
    found = msgspec.structs.replace(cast.desired_state(), since_ms=expected_state.since_ms)
    assert found == expected_state
    # and every request to be complete.
    cast.go_on()
    cast.ask(4)
    if expected_state.weights:
        check_mixed(cast)
    else:
        cast.check_requests()


def only(cast: Cast, given: SignalReceipt, victim: str) -> bool:
    """Wait until only this worker has yet to obey."""
    return eventually(
        lambda: workers(cast.signals.unacknowledged(given)) == [victim], timeout_s=BOUND_S
    )


def check_mixed(cast: Cast) -> None:
    """Check that each answer begins with the old weights' tokens and ends with the new ones'."""
    cast.plant.results(cast.sent)
    for one in cast.sent:
        answer = cast.plant.answer(one.id)
        answer.check_stream()
        made, old, new = answer.result.tokens, expected(one), expected(one, NEW)
        assert any(made == old[:at] + new[at:] for at in range(len(old) + 1))
    cast.check_blame()


@pytest.mark.long
@pytest.mark.parametrize(("signal", "run_state"), running_first(cells("redundant")))
def test_a_redundant_signal_changes_no_worker(
    plant: Plant, signal: Signal, run_state: RunState
) -> None:
    # Given three workers, one of which is frozen
    cast = start(plant, signal, run_state)
    begin = cast.desired_state()
    cast.freeze("b")
    said = plant.connection.xlen(plant.keys.control)

    # If a redundant signal is given, while the frozen one is killed and another joins,
    given = cast.signals.give(cast.order(signal, mode="abort"))
    cast.enter("d")
    cast.kill("b")
    plant.end_leases("b")

    # I expect no control entry, a wait no longer than a lease,
    assert given.is_redundant
    assert plant.connection.xlen(plant.keys.control) == said
    assert cast.signals.wait(given, BOUND_S) == []
    # unchanged workers,
    cast.enter("b")
    cast.are_in(begin, "abcd")
    # and every request to be complete.
    cast.go_on()
    cast.ask(4)
    cast.check_requests()


@pytest.mark.long
@pytest.mark.parametrize(("signal", "run_state"), running_first(cells("invalid")))
def test_an_invalid_signal_changes_no_worker(
    plant: Plant, signal: Signal, run_state: RunState
) -> None:
    # Given three workers, one of which is frozen
    cast = start(plant, signal, run_state)
    begin = cast.desired_state()
    cast.freeze("b")

    # If an invalid signal is given, while the frozen one is killed and another joins,
    with pytest.raises(Invalid, match=f"{signal}: {cast.scope} is {run_state}"):
        cast.signals.give(cast.order(signal))
    cast.enter("d")
    cast.kill("b")
    plant.end_leases("b")

    # I expect unchanged workers, and every request to be complete.
    cast.enter("b")
    cast.are_in(begin, "abcd")
    assert cast.desired_state() == begin
    cast.go_on()
    cast.ask(4)
    cast.check_requests()


@pytest.mark.long
@pytest.mark.parametrize(
    ("signal", "run_state"), running_first(list(product(sorted(ENDS), RUN_STATES)))
)
def test_a_signal_to_go_ends_only_the_hosts_that_were_there(
    plant: Plant, signal: Signal, run_state: RunState
) -> None:
    # Given three workers, one of which is frozen
    cast = start(plant, signal, run_state)
    begin = cast.desired_state()
    victim = cast.freeze("b")

    # If all must leave, and a fourth joins,
    given = cast.signals.give(cast.order(signal))
    assert len(given.workers) == 3
    cast.enter("d")
    cast.ask(4)

    # I expect two hosts to end gracefully, and the wait to name the third,
    assert [cast.hosts[name].wait() for name in "ac"] == [0, 0]
    assert only(cast, given, victim)
    # and after its death to last only until its lease expires.
    cast.kill("b")
    assert workers(cast.signals.wait(given, 0.0)) == [victim]
    plant.end_leases("b")
    assert cast.signals.wait(given, BOUND_S) == []

    # I expect the late one and a successor to stay, in the earlier desired state,
    cast.enter("b")
    cast.are_in(begin, "bd")
    # and to complete the requests that the others left.
    cast.go_on()
    cast.check_requests()


@pytest.mark.long
def test_a_signal_that_all_refuse_reports_the_reasons(plant: Plant) -> None:
    # Given three paused workers, one of which is frozen, and weights that none of them can load
    cast = start(plant, "RELOAD_WEIGHTS", "PAUSED")
    victim = cast.freeze("b")
    order = cast.order("RELOAD_WEIGHTS")
    given = cast.signals.give(msgspec.structs.replace(order, weights=f"/checkpoints/{BROKEN}"))

    # I expect the others to report why they refuse, and the wait to name the frozen one.
    def refused() -> dict[str, str]:
        return {one.worker: one.reason for one in cast.signals.unacknowledged(given)}

    eventually(
        lambda: [one for one, why in refused().items() if not why] == [victim], timeout_s=BOUND_S
    )
    assert all("broken weights" in why for one, why in refused().items() if one != victim)

    # If it is killed, I expect the wait to end when only workers that refused remain,
    cast.kill("b")
    assert victim in workers(cast.signals.wait(given, 0.0))
    plant.end_leases("b")
    left = cast.signals.wait(given, BOUND_S)
    assert {one.name for one in left} == {"a", "c"}
    assert all("broken weights" in one.reason for one in left)
    # and all to obey once the signal is taken back.
    back = cast.signals.give(msgspec.structs.replace(order, weights=""))
    assert cast.signals.wait(back, BOUND_S) == []
    cast.go_on()
    cast.check_requests()


@pytest.mark.long
@pytest.mark.parametrize("run_state", RUN_STATES)
def test_a_process_that_dies_returns_in_its_desired_state(
    plant: Plant, run_state: RunState
) -> None:
    # Given three workers in a desired state, with an epoch
    cast = start(plant, "SET_GENERATION_EPOCH", run_state)
    cast.tell("SET_GENERATION_EPOCH")
    (victim, info), *_ = plant.roster().items()

    # If one's process is killed, but not its controller,
    os.kill(info.pid, signals_of_the_system.SIGKILL)

    # I expect it to return as a new incarnation in the same desired state,
    eventually(lambda: victim not in plant.roster(), timeout_s=BOUND_S)
    cast.are_in(cast.desired_state(), "abc")
    asked_again = SignalReceipt(
        cast.order("SET_GENERATION_EPOCH"), (cast.signals.desired_states().changed,)
    )
    assert cast.signals.wait(asked_again, BOUND_S) == []
    # and every request to be complete.
    cast.go_on()
    more = cast.ask(4)
    cast.check_requests()
    assert {one.provenance.epoch for one in plant.results(more) if one.provenance} == {7}
