"""Generation epochs and new weights, end to end: results say under which they were made.

The engine is the simulated one: its tokens follow from the request and the weights, so each says
which weights made it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import get_args

import psutil
import pytest

from tests.support.builders import make_request
from tests.support.processes import START_S, Answer, Plant
from tests.support.streams import check_exact, expected, streams, wait_mid_stream
from tests.support.waiting import eventually
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import DesiredState, Order, PauseMode, Trial, model_scope
from tokenyard.protocol.wire import Request, SamplingParams
from worker.engines.simulated.engine import BROKEN, CORRUPT

STEP_S = 0.02
SIM = model_scope("sim")
PATH = "/checkpoints/7"


@pytest.fixture
def signals(plant: Plant) -> Signals:
    return Signals(plant)


def quiet(count: int) -> list[Request]:
    """Short requests that do not stream."""
    params = SamplingParams(max_tokens=4)
    return [make_request(tokens=[7, n + 1], params=params) for n in range(count)]


def set_epoch(signals: Signals, epoch: int, scope: str = SIM) -> None:
    """From here on all workers are in this epoch."""
    given = signals.give(Order(signal="SET_GENERATION_EPOCH", scope=scope, epoch=epoch))
    assert signals.wait(given, START_S) == []


def epochs(answer: Answer) -> tuple[int | None, int | None]:
    """In which epoch a request ended, and in which it began where that was another."""
    made = answer.result.provenance
    assert made is not None
    return made.epoch, made.first_epoch


def check_weights(plant: Plant, requests: Sequence[Request]) -> list[tuple[int | None, int | None]]:
    """Each has one result, of the weights that its epoch had: 4 the model's own, 5 those at `PATH`.

    Returns their epochs.
    """
    plant.results(requests)
    answers = [plant.answer(request.id) for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        assert answer.result.ok, answer.result.error
        answer.check_stream()
        made, own, new = answer.result.tokens, expected(request), expected(request, PATH)
        match epochs(answer):
            case (4, None):
                assert made == own
            case (5, None):
                assert made == new
            case (5, 4):
                assert any(made == own[:at] + new[at:] for at in range(len(own) + 1))
            case other:
                raise AssertionError(f"epochs {other}")
    return [epochs(answer) for answer in answers]


def asked(plant: Plant, count: int = 5) -> set[tuple[int | None, int | None]]:
    """The epochs of the answers to so many new requests, whose weights are checked."""
    requests = quiet(count)
    plant.push_all(requests)
    return set(check_weights(plant, requests))


@pytest.mark.long
def test_results_have_their_epoch_also_across_a_reload(plant: Plant, signals: Signals) -> None:
    # Given a request from before any epoch, and running streams of epoch 1
    plant.up(simulated_step_s=STEP_S)
    before, during, after = quiet(1), streams(3, max_tokens=200), quiet(1)
    plant.push_all(before)
    first = check_exact(plant, before)
    set_epoch(signals, 1)
    plant.push_all(during)
    wait_mid_stream(plant, during)

    # If epoch 2 begins
    set_epoch(signals, 2)
    plant.push_all(after)

    # I expect each result to say so, and no token of the streams twice or missing.
    last = check_exact(plant, after)
    assert [epochs(answer) for answer in first + last] == [(None, None), (2, None)]
    across = check_exact(plant, during)
    assert [epochs(answer) for answer in across] == [(2, 1)] * 3
    assert all(answer.deltas for answer in across)
    (info,) = plant.wait_for_workers(1).values()
    assert info.epoch == 2


def test_epoch_of_the_worker_is_that_of_the_narrowest_scope(plant: Plant, signals: Signals) -> None:
    plant.coordinator()
    plant.worker(name="one")
    plant.worker(name="two")
    plant.wait_for_workers(2)

    set_epoch(signals, 3, "all")
    set_epoch(signals, 8, "worker:two")

    plant.wait_for_turns("one", "two")
    requests = quiet(20)
    plant.push_all(requests)
    found = {
        (answer.result.provenance.worker.partition(".")[0], *epochs(answer))
        for answer in check_exact(plant, requests)
        if answer.result.provenance
    }
    assert found == {("one", 3, None), ("two", 8, None)}


@pytest.mark.long
def test_worker_killed_between_two_epochs(plant: Plant, signals: Signals) -> None:
    # Given a worker in epoch 1, with streams and a request without published tokens
    plant.up(simulated_step_s=STEP_S)
    set_epoch(signals, 1)
    shown, unseen = streams(3), make_request(params=SamplingParams(max_tokens=150))
    plant.push_all([*shown, unseen])
    wait_mid_stream(plant, shown)
    (info,) = plant.wait_for_workers(1).values()

    # If it is killed before it learns of epoch 2
    psutil.Process(info.pid).suspend()
    signals.give(Order(signal="SET_GENERATION_EPOCH", scope=SIM, epoch=2))
    os.kill(info.pid, signal.SIGKILL)

    # I expect its successor to know in which epoch the streams began; a request without published
    # tokens begins again.
    answers = check_exact(plant, [*shown, unseen])
    assert [epochs(answer) for answer in answers] == [*[(2, 1)] * 3, (2, None)]
    assert {answer.result.provenance.attempt for answer in answers if answer.result.provenance} == {
        2
    }


@pytest.mark.long
@pytest.mark.parametrize("mode", get_args(PauseMode))
def test_weights_are_reloaded_in_a_busy_yard(
    plant: Plant, signals: Signals, mode: PauseMode
) -> None:
    # Given two workers in epoch 4 with streams and more requests than run at once
    plant.coordinator()
    programs = [
        plant.worker(name=name, simulated_step_s=STEP_S, max_num_seqs=4) for name in ("one", "two")
    ]
    plant.wait_for_workers(2)
    set_epoch(signals, 4)
    running, waiting = streams(8, max_tokens=200), streams(12)
    during, after = quiet(30), quiet(20)
    plant.push_all(running)
    wait_mid_stream(plant, running)
    plant.push_all(waiting)

    # If new weights come, while more and more is asked
    asking = threading.Thread(target=lambda: [plant.push_all([one]) for one in during])
    asking.start()
    assert signals.reload("sim", PATH, 5, mode, START_S) == []
    plant.push_all(after)
    asking.join(START_S)

    # I expect one result for each, made of the weights of its epochs,
    said = check_weights(plant, running)
    assert set(said) == ({(4, None)} if mode == "wait" else {(5, 4)})
    check_weights(plant, [*waiting, *during])
    assert set(check_weights(plant, after)) == {(5, None)}
    # and workers that join later to have them as well.
    plant.worker(name="late", simulated_step_s=STEP_S)
    plant.wait_for_workers(3)
    eventually(lambda: {(one.weights, one.epoch) for one in plant.roster().values()} == {(PATH, 5)})
    for program in programs:
        assert program.stop() == 0
    assert asked(plant, 10) == {(5, None)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "reason"), [(BROKEN, "broken weights"), (CORRUPT, "corrupt weights")]
)
def test_a_reload_of_missing_weights_is_undone(
    plant: Plant, signals: Signals, name: str, reason: str
) -> None:
    # Given a yard in epoch 4 that runs
    plant.up(slots=2)
    set_epoch(signals, 4)

    # If its workers cannot load the weights, which shows before or only when they try
    unacknowledged = signals.reload("sim", f"/checkpoints/{name}", 5, "abort", START_S)

    # I expect them to report why, and to continue with the old weights in the old epoch.
    assert {reason in one.reason for one in unacknowledged if one.reason} == {True}
    assert asked(plant) == {(4, None)}
    assert signals.reload("sim", PATH, 5, "abort", START_S) == []
    assert asked(plant) == {(5, None)}


def begin_reload(signals: Signals, weights: str, until_ms: float) -> None:
    """The first two steps of one that goes back to the model's own weights when it fails."""
    trial = Trial(until_ms=int(until_ms))
    signals.give(Order(signal="PAUSE", scope=SIM, trial=trial))
    signals.give(Order(signal="RELOAD_WEIGHTS", scope=SIM, weights=weights, trial=trial))


@pytest.mark.long
def test_the_leader_ends_a_reload_whose_caller_is_dead(plant: Plant, signals: Signals) -> None:
    # Given a model whose operator died during a reload
    plant.worker()
    plant.wait_for_workers(1)
    set_epoch(signals, 4)
    begin_reload(signals, f"/w/{CORRUPT}", 1000 * time.time() + 1_000)
    requests = quiet(5)
    plant.push_all(requests)

    # If a leader is there when its time is over, I expect the model to run as before.
    coordinator = plant.coordinator()
    assert set(check_weights(plant, requests)) == {(4, None)}
    assert signals.desired_states().by_scope == {SIM: DesiredState(epoch=4)}
    assert "the reload was not ended in time" in coordinator.log


def test_the_leader_does_not_end_a_reload_in_progress(plant: Plant, signals: Signals) -> None:
    plant.up()
    begin_reload(signals, PATH, 1000 * time.time() + 600_000)
    set_epoch(signals, 5)

    given = signals.give(Order(signal="UNPAUSE", scope=SIM))
    assert signals.wait(given, START_S) == []

    assert asked(plant) == {(5, None)}
    assert signals.desired_states().by_scope == {SIM: DesiredState(weights=PATH, epoch=5)}


@pytest.mark.long
def test_a_host_killed_during_a_reload_returns_with_the_weights_of_the_others(
    plant: Plant, signals: Signals
) -> None:
    # Given two hosts with new weights, of which one is killed
    plant.coordinator()
    first = plant.worker(name="first")
    plant.worker(name="second")
    plant.wait_for_workers(2)
    set_epoch(signals, 4)
    begin_reload(signals, PATH, 1000 * time.time() + 600_000)
    eventually(lambda: {one.weights for one in plant.roster().values()} == {PATH})
    first.kill()

    # If the reload fails, and the host comes back
    given = signals.end_trial(SIM)
    assert given
    plant.worker(name="first-again")
    living = {"second", "first-again"}

    def weights() -> dict[str, str]:
        workers = plant.roster().values()
        return {one.name: one.weights for one in workers if one.name in living and one.epoch == 4}

    eventually(lambda: weights() == dict.fromkeys(living, ""))

    # I expect all to run with the weights before.
    assert asked(plant, 20) == {(4, None)}
