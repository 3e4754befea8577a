"""New weights for a model: one call pauses, loads, sets the epoch, and goes back if it fails."""

from __future__ import annotations

import threading
from typing import Self

import msgspec
import pytest

from tests.integration.played_host import ADDER, BOUND_S, PlayedHost, names, ordered
from tests.support.fake_clock import FakeClock
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.ops.control import SignalReceipt, Signals, Unacknowledged
from tokenyard.protocol.control import DesiredState, Invalid, Order, encode_desired


def test_a_reload_says_whose_it_is(
    signals: Signals, host: PlayedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a reload that is under way
    def look(*_: object, **__: object) -> list[Unacknowledged]:
        seen.append(signals.desired_states().by_scope[ADDER])
        return []

    seen: list[DesiredState] = []
    host.join("w")
    monkeypatch.setattr(signals, "wait", look)
    assert signals.reload("adder", "", 1, "abort", BOUND_S, by="kim@north") == []

    # I expect that whoever looks sees whose it is, until all run again.
    *held, over = seen
    assert [(one.by, one.why) for one in held] == [("kim@north", "reload")] * 3
    assert (over.run_state, over.by, over.why) == ("RUNNING", "", "")


class Obedient:
    """A worker that obeys everything as soon as it is given, or refuses it."""

    def __init__(
        self,
        signals: Signals,
        host: PlayedHost,
        refuses: str = "",
        *,
        name: str = "w",
        cannot_see: str = "",
    ) -> None:
        """It refuses weights, or ``cannot_see`` them already when its host is asked to look."""
        self.seen: list[DesiredState] = []
        self._signals, self._host, self._refuses = signals, host, refuses
        self._cannot_see = cannot_see
        self._name = name
        self.worker = host.join(name, controller=name)
        host.offer(name, "adder")
        self._obeyed = signals.desired_states().changed
        self._heard = "-"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=BOUND_S)

    def _run(self) -> None:
        while not self._over.wait(0.005):
            desired_states = self._signals.desired_states()
            if desired_states.changed != self._obeyed:
                self._obeyed = desired_states.changed
                self._do(desired_states.of(self._name, "adder"))
            self._check()

    def _check(self) -> None:
        for entry, command in self._host.commands(self._heard):
            self._heard = entry
            if command.verb == "check" and command.worker == self.worker:
                is_seen = command.weights != self._cannot_see
                self._host.answer(self.worker, entry, "" if is_seen else "no such folder")

    def _do(self, desired_state: DesiredState) -> None:
        self.seen.append(desired_state)
        if self._refuses and desired_state.weights == self._refuses:
            self._host.answer(self.worker, self._obeyed, "no such folder")
        else:
            self._host.show(self.worker, obeyed=self._obeyed)


def test_new_weights_are_one_call(signals: Signals, host: PlayedHost) -> None:
    with Obedient(signals, host) as worker:
        left = signals.reload("adder", "/step-2", 2, "wait", BOUND_S)

    # I expect the worker to have been through all steps, one after the other.
    assert left == []
    assert worker.seen == [
        DesiredState(run_state="PAUSED", mode="wait"),
        DesiredState(run_state="PAUSED", mode="wait", weights="/step-2"),
        DesiredState(run_state="PAUSED", mode="wait", weights="/step-2", epoch=2),
        DesiredState(weights="/step-2", epoch=2),
    ]
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}


@pytest.mark.long
def test_weights_that_one_worker_refuses_come_to_nobody(signals: Signals, host: PlayedHost) -> None:
    # Given two workers of which one cannot load what it should, though its host could see it
    with (
        Obedient(signals, host) as other,
        Obedient(signals, host, refuses="/bad", name="v") as worker,
    ):
        assert signals.reload("adder", "/step-1", 1, "abort", BOUND_S) == []
        begun = len(worker.seen)
        left = signals.reload("adder", "/bad", 2, "abort", BOUND_S)

        # I expect to be told, and both to run with the weights before, in the epoch before
        # (the other may not have answered yet: the first refusal ends the wait),
        refusals = [one for one in left if one.reason]
        assert refusals == [Unacknowledged(worker.worker, "v", "no such folder")]
        assert ordered(signals) == {ADDER: DesiredState(weights="/step-1", epoch=1)}
        eventually(lambda: other.seen[-1] == DesiredState(weights="/step-1", epoch=1))
        assert DesiredState(run_state="PAUSED", weights="/bad", epoch=1) in worker.seen[begun:]
        # also when it is asked once more, and others to be taken all the same.
        assert worker.worker in names(signals.reload("adder", "/bad", 2, "abort", BOUND_S))
        assert signals.reload("adder", "/good", 2, "abort", BOUND_S) == []
    assert ordered(signals) == {ADDER: DesiredState(weights="/good", epoch=2)}


def test_weights_that_a_host_cannot_see_pause_nobody(signals: Signals, host: PlayedHost) -> None:
    # Given a host that may load the model, and holds nothing yet
    with (
        Obedient(signals, host) as other,
        Obedient(signals, host, name="v", cannot_see="/nope") as worker,
    ):
        host.show(worker.worker, state="warm", model="")

        left = signals.reload("adder", "/nope", 2, "abort", BOUND_S)

    # The other may not have answered yet: the first refusal ends the wait.
    refusals = [one for one in left if one.reason]
    assert refusals == [Unacknowledged(worker.worker, "v", "no such folder")]
    assert (other.seen, worker.seen) == ([], [])
    assert ordered(signals) == {}


def test_a_host_that_does_not_answer_pauses_nobody(
    signals: Signals, host: PlayedHost, fake_clock: FakeClock
) -> None:
    worker = host.join("w", controller="w")
    host.offer("w", "adder")

    began = fake_clock.now
    assert signals.reload("adder", "/step-2", 2, "abort", BOUND_S) == [Unacknowledged(worker, "w")]
    assert fake_clock.now >= began + BOUND_S
    assert ordered(signals) == {}


def test_reload_without_a_live_host_is_invalid(signals: Signals, host: PlayedHost) -> None:
    host.join("w", controller="w")
    host.offer("w", "subtractor")
    host.offer("gone", "adder")  # its last worker has gone

    with pytest.raises(Invalid, match="no live host may load adder"):
        signals.reload("adder", "/step-2", 2, "abort", BOUND_S)
    assert ordered(signals) == {}


def test_reload_reverts_if_a_worker_does_not_pause_in_time(
    signals: Signals, host: PlayedHost, fake_clock: FakeClock
) -> None:
    worker = host.join("w", controller="w")

    began = fake_clock.now
    assert names(signals.reload("adder", "", 2, "abort", BOUND_S)) == [worker]
    assert fake_clock.now >= began + BOUND_S
    assert ordered(signals) == {}


def test_failed_reload_keeps_an_earlier_pause(signals: Signals, host: PlayedHost) -> None:
    with Obedient(signals, host, refuses="/bad"):
        signals.give(Order(signal="PAUSE", scope=ADDER, mode="wait"))

        assert signals.reload("adder", "/bad", 2, "abort", BOUND_S)

    assert ordered(signals) == {ADDER: DesiredState(run_state="PAUSED", mode="wait")}


def test_an_interrupted_reload_goes_back(
    signals: Signals, host: PlayedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that is still loading when somebody presses Ctrl-C
    def interrupt(*_: object, **__: object) -> list[Unacknowledged]:
        if signals.desired_states().of("w", "adder").weights == "/step-2":
            raise KeyboardInterrupt
        return []

    with Obedient(signals, host):
        monkeypatch.setattr(signals, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            signals.reload("adder", "/step-2", 2, "abort", BOUND_S)

    assert ordered(signals) == {}


class Died(BaseException):
    """Takes the place of SIGKILL."""


@pytest.mark.parametrize(
    ("step", "left_behind"),
    [
        (1, DesiredState(run_state="PAUSED")),
        (2, DesiredState(run_state="PAUSED", weights="/step-2")),
        (3, DesiredState(run_state="PAUSED", weights="/step-2", epoch=2)),
    ],
)
def test_a_reload_whose_caller_was_killed_can_be_ended_or_done(
    signals: Signals,
    host: PlayedHost,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    left_behind: DesiredState,
) -> None:
    # Given a caller that has died after so many steps
    def die(given: SignalReceipt, *_: object, **__: object) -> list[Unacknowledged]:
        waited.append(given)
        if len(waited) == step:
            raise Died
        return []

    waited: list[SignalReceipt] = []
    with Obedient(signals, host):
        with monkeypatch.context() as patched:
            patched.setattr(signals, "wait", die)
            with pytest.raises(Died):
                signals.reload("adder", "/step-2", 2, "abort", BOUND_S)
        found = ordered(signals)[ADDER]
        assert msgspec.structs.replace(found, trial=None) == left_behind
        assert found.trial

        # I expect its end to bring back what was; or what is, once everybody has it;
        signals.end_trial(ADDER)
        kept = {ADDER: DesiredState(weights="/step-2", epoch=2)} if step == 3 else {}
        assert ordered(signals) == kept
        assert signals.end_trial(ADDER) is None

        # and the same call to do it all.
        assert signals.reload("adder", "/step-2", 2, "abort", BOUND_S) == []
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_reload_that_was_cut_off_goes_on(signals: Signals, host: PlayedHost, done: int) -> None:
    # Given a reload whose caller died after so many of its steps
    orders = [
        Order(signal="PAUSE", scope=ADDER),
        Order(signal="RELOAD_WEIGHTS", scope=ADDER, weights="/step-2"),
        Order(signal="SET_GENERATION_EPOCH", scope=ADDER, epoch=2),
    ]
    with Obedient(signals, host) as worker:
        for order in orders[:done]:
            assert signals.wait(signals.give(order), BOUND_S) == []

        # I expect that the next one does the rest, and pauses nothing twice.
        assert signals.reload("adder", "/step-2", 2, "abort", BOUND_S) == []
    paused, *others = worker.seen
    assert paused == DesiredState(run_state="PAUSED")
    assert paused not in others
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}


@pytest.mark.parametrize(
    ("begin", "epoch", "hint"),
    [
        (DesiredState(run_state="SUSPENDED"), 2, "is SUSPENDED: PAUSE it first"),
        (DesiredState(), -1, "give the epoch"),
        (DesiredState(weights="/step-2", epoch=1), 2, "a path of its own"),
    ],
)
def test_a_reload_that_cannot_succeed_does_not_begin(
    signals: Signals, yard: PlayedYard, begin: DesiredState, epoch: int, hint: str
) -> None:
    packed = encode_desired(begin)
    if packed:
        yard.connection.hset(yard.keys.desired, ADDER, packed)
    with pytest.raises(Invalid, match=hint):
        signals.reload("adder", "/step-2", epoch, "abort", BOUND_S)

    assert yard.connection.hget(yard.keys.desired, ADDER) == (packed or None)
    assert not yard.connection.exists(yard.keys.control)


def test_a_reload_that_is_done_already_changes_nothing_in_the_end(
    signals: Signals, host: PlayedHost
) -> None:
    with Obedient(signals, host):
        for _ in range(2):
            assert signals.reload("adder", "/step-2", 2, "abort", BOUND_S) == []
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}
