"""Requests that crash their workers, requests whose workers are killed, and engines that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.streams import (
    attempts,
    begun,
    check_beginning,
    check_exact,
    check_serves,
    dead_letters,
    held_by,
    streams,
    wait_mid_stream,
)
from tests.support.waiting import eventually
from tokenyard.protocol.streams import position
from tokenyard.protocol.wire import Request, SamplingParams
from worker.engines.crash_points import FAULTY, POISON

pytestmark = pytest.mark.crash

STEP_S = 0.01


@pytest.fixture
def plant(broker: Server) -> Iterator[Plant]:
    with Plant(broker.url) as started:
        yield started


def special(prefix: tuple[int, ...], max_tokens: int = 20) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return make_request(tokens=[*prefix, 1], stream=True, params=params)


def test_poison_among_good_requests_fails_alone(plant: Plant) -> None:
    # Given fifty good requests on two workers, and one among them that kills its worker
    plant.up(slots=2, simulated_step_s=STEP_S, crash_point="poison:3")
    good = streams(50, max_tokens=15)
    poison = special(POISON)
    plant.push_all([*good[:25], poison, *good[25:]])

    # I expect all good ones to complete with unchanged tokens,
    answers = check_exact(plant, good)
    assert max(attempts(answers)) >= 2, "it had neighbours"
    # only the poison to fail, with the known details of the crash,
    result = plant.result(poison.id)
    assert (result.status, result.error.code) == ("failed", "POISONED")
    assert "SIGSEGV" in result.error.message
    check_beginning(plant, poison)
    (letter,) = dead_letters(plant)
    assert letter["id"] == poison.id
    assert letter["dead_reason"].startswith("POISONED: ")
    assert "SIGSEGV" in letter["dead_reason"]
    # and both workers to serve.
    plant.wait_for_workers(2)
    check_serves(plant, 4)
    assert not plant.connection.exists(plant.keys.quarantine, plant.keys.departed)


@pytest.mark.long
def test_requests_run_together_again_after_a_chance_crash(plant: Plant) -> None:
    # Given forty harmless streams on a worker
    plant.up(simulated_step_s=0.03, max_num_seqs=64)
    (worker,) = plant.roster().values()
    requests = begun(plant, 40, max_tokens=240)

    # If its engine crashes
    os.kill(worker.pid, signal.SIGSEGV)

    # I expect them to be tried in groups, and all to run again before any ends,
    eventually(lambda: b"+" in b"".join(plant.connection.hvals(plant.keys.quarantine)))
    (name,) = plant.wait_for_workers(1)
    eventually(lambda: len(held_by(plant, requests, name)) == 40)
    assert {plant.ledger(one.id)["state"] for one in requests} == {"assigned"}
    # to end exactly at their second attempt, and the lane to be open.
    assert set(attempts(check_exact(plant, requests))) == {2}
    assert all("on trial with" in plant.ledger(one.id)["t2"] for one in requests)
    assert dead_letters(plant) == []
    eventually(lambda: not plant.connection.exists(plant.keys.quarantine))
    assert not any("trial" in plant.ledger(one.id) for one in requests)


@pytest.mark.long
def test_search_for_a_poison_continues_under_another_coordinator(plant: Plant) -> None:
    # Given a poison among twenty streams
    first = plant.coordinator()
    plant.worker(slots=2, simulated_step_s=STEP_S, max_num_seqs=32, crash_point="poison")
    plant.wait_for_workers(2)
    good, poison = streams(20, max_tokens=200), special(POISON)
    plant.push_all([*good[:10], poison, *good[10:]])

    # If the coordinator is killed during the trials of their groups
    eventually(lambda: plant.ledger(poison.id).get("trial"))
    first.kill()
    plant.end_lead()
    plant.coordinator()

    # I expect its successor to blame only the poison.
    assert plant.result(poison.id).error.code == "POISONED"
    check_exact(plant, good)
    assert [letter["id"] for letter in dead_letters(plant)] == [poison.id]
    crashes = [int(plant.ledger(one.id).get("crashed_alone", 0)) for one in good]
    assert max(crashes) == 0


@pytest.mark.long
def test_kill_from_outside_splits_no_group_on_trial(plant: Plant) -> None:
    # Given a group on trial that is too slow to end
    plant.coordinator(trial_tokens=1000)
    plant.worker(simulated_step_s=0.03, max_num_seqs=32)
    (worker,) = plant.wait_for_workers(1).values()
    requests = begun(plant, 8, max_tokens=120)
    os.kill(worker.pid, signal.SIGSEGV)
    eventually(lambda: sum("on trial" in plant.ledger(one.id).get("t2", "") for one in requests))
    (name,) = (n.decode() for n in plant.connection.hkeys(plant.keys.quarantine))
    on_trial = held_by(plant, requests, name)
    assert {plant.ledger(one.id)["trial"] for one in on_trial} == {"2"}

    # If its worker is killed from outside
    os.kill(plant.roster()[name].pid, signal.SIGKILL)

    # I expect the size of the groups to stay, and all requests to complete.
    eventually(lambda: all(plant.ledger(one.id).get("crashes") == "2" for one in on_trial))
    assert {plant.ledger(one.id)["trial"] for one in on_trial} == {"2"}
    check_exact(plant, requests)


@pytest.mark.long
def test_request_that_loses_too_many_workers_runs_alone(plant: Plant) -> None:
    # Given a request that has lost two workers, the limit
    plant.coordinator(max_crashes=2)
    plant.worker(simulated_step_s=0.02)
    (request,) = streams(1, max_tokens=300)
    plant.push(request)
    for crashes in (1, 2):
        wait_mid_stream(plant, [request], least=crashes * 5)
        (worker,) = plant.wait_for_workers(1).values()
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda n=crashes: plant.ledger(request.id).get("crashes") == str(n))

    # I expect it to run alone on its lane, while others wait, and to complete.
    (name,) = plant.wait_for_workers(1)
    eventually(lambda: plant.connection.hget(plant.keys.quarantine, name))
    others = streams(3, max_tokens=5)
    plant.push_all(others)
    answers = check_exact(plant, [request, *others])
    assert attempts(answers) == [3, 1, 1, 1]
    ended = plant.connection.xrange(plant.keys.reply("anon", request.id))[-1][0]
    for other in others:
        begun = plant.connection.xrange(plant.keys.reply("anon", other.id))[0][0]
        assert position(begun.decode()) > position(ended.decode())
    assert dead_letters(plant) == []


@pytest.mark.long
def test_hanging_engine_counts_as_a_crash(plant: Plant) -> None:
    # Given a worker that makes no step while it has a stream, and one that nobody hurries
    plant.coordinator()
    never = {"backoff_s": 600, "max_backoff_s": 600}
    plant.worker(name="stuck", simulated_step_s=0.02, hang_timeout_s=10, **never)
    (worker,) = plant.wait_for_workers(1).values()
    (request,) = begun(plant, 1, max_tokens=3000)
    psutil.Process(worker.pid).suspend()
    plant.worker(name="fast")

    # I expect its controller to kill it, and the stream to continue as a suspect.
    assert attempts(check_exact(plant, [request])) == [2]
    ledger = plant.ledger(request.id)
    assert (ledger["crashes"], ledger["suspected"]) == ("1", "1")
    assert "no progress" in ledger["reason"]


@pytest.mark.long
def test_request_after_an_engine_fault_is_retried_and_completes(plant: Plant) -> None:
    # Given an engine that fails a request twice in mid-stream
    plant.up(simulated_step_s=STEP_S, crash_point="fault:2")
    faulty, neighbours = special(FAULTY), streams(5)

    plant.push_all([*neighbours, faulty])

    # I expect the third attempt to complete it, and its neighbours to be unaffected.
    (answer, *others) = check_exact(plant, [faulty, *neighbours])
    assert attempts([answer, *others]) == [3, 1, 1, 1, 1, 1]
    ledger = plant.ledger(faulty.id)
    assert ledger["faults"] == "2"
    assert "crashes" not in ledger
    assert " fault told to fail" in ledger["r1"]
    assert dead_letters(plant) == []
