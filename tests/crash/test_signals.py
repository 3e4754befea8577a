"""Every cell of the table of signals, while one worker joins late and another is killed.

Three hosts, each with one worker, have requests that run and requests that wait. One of them is
frozen before the signal, so that it is certain not to have obeyed when it is killed; a fourth one
joins after the signal. Nothing may be lost or come twice, all must end in the desired state that
the table says, and whoever waits must be told who is missing, and no longer than it is.
"""

from __future__ import annotations

import os
import signal as signals_of_the_system
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.builders import make_request
from tests.support.processes import Plant, Program
from tests.support.servers import Server
from tests.support.streams import check_exact, dead_letters, expected, streams, wait_mid_stream
from tests.support.waiting import eventually
from tokenyard.admin.signals import SignalReceipt, Signals, Unacknowledged
from tokenyard.protocol.control import (
    ALL,
    PAUSE_MODES,
    RUN_STATES,
    SIGNALS,
    DesiredState,
    Invalid,
    Order,
    PauseMode,
    RunState,
    Signal,
    after,
    model_scope,
)
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.protocol.worker_info import WorkerInfo

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]

STEP_S = 0.02
LEASE_MS = 4_000
#: Of a host whose lease ends when the test says so, however slow the others are to obey.
LONG_MS = 3_600_000
BOUND_S = 60.0
NEW = "/checkpoints/new"
WAYS: dict[RunState, tuple[Signal, ...]] = {
    "RUNNING": (),
    "PAUSED": ("PAUSE",),
    "SUSPENDED": ("PAUSE", "SUSPEND"),
}
ENDS = {"DRAIN", "STOP"}


@pytest.fixture
def plant(valkey_broker: Server) -> Iterator[Plant]:
    with Plant(valkey_broker.url) as started:
        yield started


class Cast:
    """Four hosts, their operator, and what clients ask of them meanwhile."""

    def __init__(self, plant: Plant, scope: str = ALL) -> None:
        self.plant = plant
        self.scope = scope
        self.signals = Signals(plant.connection, plant.keys)
        self.hosts: dict[str, Program] = {}
        self.sent: list[Request] = []
        plant.coordinator(lease_ms=2_000)
        for name in "abc":
            self.enter(name)
        plant.wait_for_workers(3)
        plant.wait_for_turns("a", "b", "c")

    def enter(self, name: str) -> None:
        """A host starts, maybe in place of one of that name that is gone."""
        self.hosts[name] = self.plant.worker(
            name=name, simulated_step_s=STEP_S, max_num_seqs=2, lease_ms=LEASE_MS, grace_s=0.5
        )

    def ask(self, count: int) -> list[Request]:
        """More requests, streams and others."""
        quiet = [
            make_request(tokens=[7, len(self.sent) + n], params=SamplingParams(max_tokens=20))
            for n in range(count // 4)
        ]
        more = [*streams(count - len(quiet), max_tokens=100), *quiet]
        self.plant.push_all(more)
        self.sent += more
        return more

    def order(self, signal: Signal, mode: PauseMode = "keep") -> Order:
        return Order(signal=signal, scope=self.scope, mode=mode, epoch=7, weights=NEW)

    def tell(self, *signals: Signal) -> None:
        """Give signals that all obey."""
        for signal in signals:
            given = self.signals.give(self.order(signal))
            assert self.signals.wait(given, BOUND_S) == []

    def desired_state(self) -> DesiredState:
        return self.signals.desired_states().by_scope.get(self.scope, DesiredState())

    def freeze(self, name: str) -> str:
        """A host hears nothing any longer; its worker."""
        (worker,) = (one for one, info in self.plant.roster().items() if info.name == name)
        host = self.hosts[name]
        for process in (psutil.Process(host.pid), *host.children()):
            process.suspend()
        return worker

    def prolong(self, worker: str) -> None:
        """Its lease does not run out by itself."""
        seconds, _ = self.plant.connection.time()
        leases = {worker: seconds * 1000 + LONG_MS}
        self.plant.connection.zadd(self.plant.keys.leases, leases, xx=True)

    def expire(self, worker: str) -> None:
        """Its lease is over."""
        self.plant.connection.zadd(self.plant.keys.leases, {worker: 1}, xx=True)

    def kill(self, name: str) -> None:
        """SIGKILL to the controller and its worker."""
        self.hosts[name].end()

    def newest(self) -> dict[str, WorkerInfo]:
        """The workers by name; of several incarnations the newest."""
        roster = self.plant.roster()
        incarnations = sorted(roster, key=lambda worker: int(worker.rpartition(".")[2]))
        return {roster[worker].name: roster[worker] for worker in incarnations}

    def are_in(self, desired_state: DesiredState, names: str) -> None:
        """Wait until these, and no others, do what the desired state says."""

        def are_there() -> bool:
            shown = {name: _shown(info) for name, info in self.newest().items()}
            return shown == dict.fromkeys(names, _shown(desired_state))

        eventually(are_there, timeout_s=BOUND_S)

    def go_on(self) -> None:
        """Whatever the desired state is, all run again."""
        self.tell("RESUME", "UNPAUSE")

    def check_requests(self) -> None:
        """Each has one result and every token once; nothing counts as a fault but the one death."""
        check_exact(self.plant, [one for one in self.sent if one.stream])
        quiet = [one for one in self.sent if not one.stream]
        for one, result in zip(quiet, self.plant.results(quiet), strict=True):
            assert result.ok, result.error
            assert result.tokens == expected(one)
        self.check_blame()

    def check_blame(self) -> None:
        ledgers = [self.plant.ledger(one.id) for one in self.sent]
        assert all(int(ledger.get("crashes", 0)) <= 1 for ledger in ledgers)
        assert not any({"suspected", "faults"} & ledger.keys() for ledger in ledgers)
        assert dead_letters(self.plant) == []


def _shown(one: WorkerInfo | DesiredState) -> tuple[object, ...]:
    """What a worker shows of its desired state; without an engine no epoch and no weights."""
    has_engine = one.run_state != "SUSPENDED"
    return (one.run_state, one.epoch, one.weights) if has_engine else (one.run_state,)


def workers(receipts: Sequence[Unacknowledged]) -> list[str]:
    return [one.worker for one in receipts]


def start(plant: Plant, signal: Signal, run_state: RunState) -> Cast:
    """Three workers in a desired state, in the middle of requests, with others that wait."""
    is_for_model = (signal, run_state) == ("RELOAD_WEIGHTS", "PAUSED")
    cast = Cast(plant, model_scope("sim") if is_for_model else ALL)
    running = cast.ask(12)[:3]
    wait_mid_stream(plant, running)
    cast.tell(*WAYS[run_state])
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


VALID = [cell for cell in cells("valid") if cell[0] not in ENDS | {"START_PROFILE"}]


@pytest.mark.parametrize(("signal", "run_state"), running_first(VALID))
def test_a_valid_signal(plant: Plant, signal: Signal, run_state: RunState) -> None:
    # Given three workers, one of which hears nothing any longer
    cast = start(plant, signal, run_state)
    victim = cast.freeze("b")
    cast.prolong(victim)

    # If a signal is given, and a fourth one joins,
    expected_state = after(cast.desired_state(), cast.order(signal))
    given = cast.signals.give(cast.order(signal))
    assert not given.is_redundant
    cast.enter("d")
    cast.ask(4)

    # I expect that the others obey, and that the one is waited for,
    assert only(cast, given, victim)
    # and when it is killed: only until its lease is over.
    cast.kill("b")
    assert workers(cast.signals.wait(given, 0.0)) == [victim]
    cast.expire(victim)
    assert cast.signals.wait(given, BOUND_S) == []

    # I expect whoever is there, joined late or came back to be in the desired state,
    cast.enter("b")
    cast.are_in(expected_state, "abcd")
    found = msgspec.structs.replace(cast.desired_state(), since_ms=expected_state.since_ms)
    assert found == expected_state
    # and no request to have suffered.
    cast.go_on()
    cast.ask(4)
    if expected_state.weights:
        check_mixed(cast)
    else:
        cast.check_requests()


def only(cast: Cast, given: SignalReceipt, victim: str) -> bool:
    """Wait until this one alone has yet to obey."""
    return eventually(
        lambda: workers(cast.signals.unacknowledged(given)) == [victim], timeout_s=BOUND_S
    )


def check_mixed(cast: Cast) -> None:
    """Each answer is one of the old weights up to somewhere, and of the new ones from there on."""
    cast.plant.results(cast.sent)
    for one in cast.sent:
        answer = cast.plant.answer(one.id)
        answer.check_stream()
        made, old, new = answer.result.tokens, expected(one), expected(one, NEW)
        assert any(made == old[:at] + new[at:] for at in range(len(old) + 1))
    cast.check_blame()


@pytest.mark.parametrize(("signal", "run_state"), running_first(cells("redundant")))
def test_a_redundant_signal(plant: Plant, signal: Signal, run_state: RunState) -> None:
    # Given three workers, one of which hears nothing any longer
    cast = start(plant, signal, run_state)
    begin = cast.desired_state()
    cast.freeze("b")
    said = plant.connection.xlen(plant.keys.control)

    # If a signal is given that changes nothing, while the one is killed and another joins,
    given = cast.signals.give(cast.order(signal, mode="abort"))
    cast.enter("d")
    cast.kill("b")

    # I expect that nothing is said, and nobody waited for longer than its lease;
    assert given.is_redundant
    assert plant.connection.xlen(plant.keys.control) == said
    assert cast.signals.wait(given, BOUND_S) == []
    # that all are as they were,
    cast.enter("b")
    cast.are_in(begin, "abcd")
    # and no request to have suffered.
    cast.go_on()
    cast.ask(4)
    cast.check_requests()


@pytest.mark.parametrize(("signal", "run_state"), running_first(cells("invalid")))
def test_an_invalid_signal(plant: Plant, signal: Signal, run_state: RunState) -> None:
    # Given three workers, one of which hears nothing any longer
    cast = start(plant, signal, run_state)
    begin = cast.desired_state()
    cast.freeze("b")

    # If a signal is given that is not allowed, while the one is killed and another joins,
    with pytest.raises(Invalid, match=f"{signal}: {cast.scope} is {run_state}"):
        cast.signals.give(cast.order(signal))
    cast.enter("d")
    cast.kill("b")

    # I expect that all are as they were, and no request to have suffered.
    cast.enter("b")
    cast.are_in(begin, "abcd")
    assert cast.desired_state() == begin
    cast.go_on()
    cast.ask(4)
    cast.check_requests()


@pytest.mark.parametrize(
    ("signal", "run_state"), running_first(list(product(sorted(ENDS), RUN_STATES)))
)
def test_a_signal_to_go(plant: Plant, signal: Signal, run_state: RunState) -> None:
    # Given three workers, one of which hears nothing any longer
    cast = start(plant, signal, run_state)
    begin = cast.desired_state()
    victim = cast.freeze("b")
    cast.prolong(victim)

    # If all are to go, and a fourth one joins,
    given = cast.signals.give(cast.order(signal))
    assert len(given.workers) == 3
    cast.enter("d")
    cast.ask(4)

    # I expect that two hosts end in order, and that the third is waited for,
    assert [cast.hosts[name].wait() for name in "ac"] == [0, 0]
    assert only(cast, given, victim)
    # and when it is killed: only until its lease is over.
    cast.kill("b")
    assert workers(cast.signals.wait(given, 0.0)) == [victim]
    cast.expire(victim)
    assert cast.signals.wait(given, BOUND_S) == []

    # I expect that the late one and a successor stay, in the desired state that there was,
    cast.enter("b")
    cast.are_in(begin, "bd")
    # and do what the others have left.
    cast.go_on()
    cast.check_requests()


@pytest.mark.parametrize("run_state", ["RUNNING", "PAUSED"])
def test_a_signal_that_all_refuse(plant: Plant, run_state: RunState) -> None:
    # Given three workers without a profiler, one of which hears nothing any longer
    cast = start(plant, "START_PROFILE", run_state)
    victim = cast.freeze("b")
    cast.prolong(victim)
    given = cast.signals.give(cast.order("START_PROFILE"))
    cast.enter("d")

    # I expect that the others say why they cannot, and that the one is waited for.
    def refused() -> dict[str, str]:
        return {one.worker: one.reason for one in cast.signals.unacknowledged(given)}

    eventually(
        lambda: [one for one, why in refused().items() if not why] == [victim], timeout_s=BOUND_S
    )
    assert all("no profiler" in why for one, why in refused().items() if one != victim)

    # If it is killed, I expect the wait to end when only such are left that have refused,
    cast.kill("b")
    assert victim in workers(cast.signals.wait(given, 0.0))
    cast.expire(victim)
    left = cast.signals.wait(given, BOUND_S)
    assert {one.name for one in left} >= {"a", "c"}
    assert all("no profiler" in one.reason for one in left)
    # that those who cannot do as they should are otherwise as all others,
    cast.enter("b")
    cast.are_in(cast.desired_state(), "abcd")
    assert not any(one.profiling for one in cast.newest().values())
    # and that nobody holds out once that is taken back.
    cast.tell("STOP_PROFILE")
    cast.go_on()
    cast.check_requests()


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_a_pause_in_each_mode(plant: Plant, mode: PauseMode) -> None:
    # Given three workers, one of which hears nothing any longer
    cast = start(plant, "PAUSE", "RUNNING")
    victim = cast.freeze("b")
    cast.prolong(victim)

    # If all are to pause, and a fourth one joins,
    given = cast.signals.give(cast.order("PAUSE", mode))
    cast.enter("d")
    late = cast.ask(4)

    # I expect the others to obey, whatever the mode, and the one to be waited for until its
    # successor obeys;
    assert only(cast, given, victim)
    cast.kill("b")
    assert workers(cast.signals.wait(given, 0.0)) == [victim]
    cast.enter("b")
    assert cast.signals.wait(given, BOUND_S) == []
    cast.expire(victim)
    cast.are_in(DesiredState(run_state="PAUSED", mode=mode), "abcd")
    # that nothing runs: no token more is published,
    before = {one.id: plant.published(one.id) for one in cast.sent}
    assert not any(plant.answer(one.id).results for one in late)
    # and that all is done once they go on, the tokens of before included.
    assert {one.id: plant.published(one.id) for one in cast.sent} == before
    cast.go_on()
    cast.check_requests()


@pytest.mark.parametrize("run_state", RUN_STATES)
def test_a_process_that_dies_comes_back_in_its_desired_state(
    plant: Plant, run_state: RunState
) -> None:
    # Given three workers in a desired state, with an epoch
    cast = start(plant, "SET_GENERATION_EPOCH", run_state)
    cast.tell("SET_GENERATION_EPOCH")
    (victim, info), *_ = plant.roster().items()

    # If the process of one is killed, and its controller is not,
    os.kill(info.pid, signals_of_the_system.SIGKILL)

    # I expect it to come back as somebody else, and in the same desired state,
    eventually(lambda: victim not in plant.roster(), timeout_s=BOUND_S)
    cast.are_in(cast.desired_state(), "abc")
    asked_again = SignalReceipt(
        cast.order("SET_GENERATION_EPOCH"), (cast.signals.desired_states().changed,)
    )
    assert cast.signals.wait(asked_again, BOUND_S) == []
    # and no request to have suffered.
    cast.go_on()
    more = cast.ask(4)
    cast.check_requests()
    assert {one.provenance.epoch for one in plant.results(more) if one.provenance} == {7}
