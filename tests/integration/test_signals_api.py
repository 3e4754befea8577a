"""`Signals`: what an operator gives, and what becomes of it in the yard."""

from __future__ import annotations

import msgspec
import pytest

from tests.integration.played_host import ADDER, BOUND_S, PAUSE, PlayedHost, names, ordered
from tests.support.fake_clock import FakeClock
from tests.support.yard import PlayedYard
from tokenyard.ops.control import SignalReceipt, Signals, Unacknowledged
from tokenyard.protocol.control import (
    ALL,
    Command,
    DesiredState,
    Invalid,
    Order,
    Signal,
    Verb,
    parse_command,
    parse_order,
    worker_scope,
)
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.scripts import Scripts


def entries(yard: PlayedYard) -> int:
    return int(yard.connection.xlen(yard.keys.control))


def test_a_pause_says_who_ordered_it_when_and_why(signals: Signals, yard: PlayedYard) -> None:
    before_ms = yard.connection.time()[0] * 1000
    signals.give(Order(signal="PAUSE", scope=ADDER, by="kim@north", why="its driver"))
    paused = signals.desired_states().by_scope[ADDER]
    assert (paused.by, paused.why) == ("kim@north", "its driver")
    assert before_ms <= paused.since_ms <= (yard.connection.time()[0] + 1) * 1000

    # If another pauses it again, I expect that it stays the pause of the first.
    signals.give(Order(signal="PAUSE", scope=ADDER, by="lee@south", why="no reason"))
    assert signals.desired_states().by_scope[ADDER] == paused

    # A suspend is its own order; without a reason it has that of the pause.
    signals.give(Order(signal="SUSPEND", scope=ADDER, by="lee@south"))
    suspended = signals.desired_states().by_scope[ADDER]
    assert (suspended.by, suspended.why) == ("lee@south", "its driver")
    signals.give(Order(signal="RESUME", scope=ADDER))
    signals.give(Order(signal="UNPAUSE", scope=ADDER, by="kim@north", why="mended"))
    assert signals.desired_states().by_scope == {}


def test_signal_sets_the_desired_state(signals: Signals, yard: PlayedYard) -> None:
    # Given a yard without signals, if the model is paused,
    order = Order(signal="PAUSE", scope=ADDER, mode="keep", why="night")
    given = signals.give(order)

    # I expect the desired state of its scope, and the order for the controllers.
    assert ordered(signals) == {ADDER: DesiredState(run_state="PAUSED", mode="keep")}
    assert given == SignalReceipt(order, (signals.desired_states().changed,))
    [(entry, fields)] = yard.connection.xrange(yard.keys.control)
    assert (entry.decode(), parse_order(fields)) == (given.ids[0], order)


def test_a_redundant_signal_writes_nothing_and_can_be_waited_for(
    signals: Signals, yard: PlayedYard, host: PlayedHost
) -> None:
    # Given a paused yard with a worker that has not obeyed yet
    first = signals.give(PAUSE)
    worker = host.join("w")
    events = yard.connection.xlen(yard.keys.events)

    # If it is paused again,
    again = signals.give(msgspec.structs.replace(PAUSE, mode="wait"))

    # I expect nothing new but the id of the last change to wait for.
    assert (again.is_redundant, again.ids) == (True, first.ids)
    assert entries(yard) == 1
    assert yard.connection.xlen(yard.keys.events) == events
    assert signals.desired_states().by_scope[ALL].mode == "abort"
    assert names(signals.unacknowledged(again)) == [worker]
    host.obey(worker, first)
    assert signals.unacknowledged(again) == []


def test_no_unacknowledged_workers_without_signals(
    signals: Signals, yard: PlayedYard, host: PlayedHost
) -> None:
    host.join("w")
    given = signals.give(Order(signal="UNPAUSE"))

    assert given.is_redundant
    assert signals.wait(given, BOUND_S) == []
    assert not yard.connection.exists(yard.keys.desired, yard.keys.control)


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        (Order(signal="SUSPEND"), "all is RUNNING: PAUSE it first"),
        (Order(signal="SET_GENERATION_EPOCH"), "give the epoch"),
        (Order(signal="PAUSE", scope="adder"), "use all, model:<name> or worker:<name>"),
        (Order(signal="DRAIN", scope="worker:"), "use all, model:<name> or worker:<name>"),
        (Order(signal="RELOAD_WEIGHTS", scope=ALL, weights="/x"), "all is RUNNING"),
    ],
)
def test_invalid_signal_changes_nothing(
    signals: Signals, yard: PlayedYard, order: Order, hint: str
) -> None:
    with pytest.raises(Invalid, match=hint):
        signals.give(order)

    assert not yard.connection.exists(yard.keys.desired, yard.keys.control, yard.keys.events)


def test_unreadable_desired_state_is_overwritten(signals: Signals, yard: PlayedYard) -> None:
    # Given nonsense where the desired state should be, which all take for the first desired state
    for nonsense in (b"{", b"\xff", b'{"run_state":"DANCING"}'):
        yard.connection.hset(yard.keys.desired, ALL, nonsense)
        with pytest.raises(Invalid):
            signals.give(Order(signal="SUSPEND"))

        # I expect that a pause puts that right.
        assert not signals.give(PAUSE).is_redundant
        assert ordered(signals) == {ALL: DesiredState(run_state="PAUSED")}


def test_desired_state_of_another_version_keeps_unknown_fields(
    signals: Signals, yard: PlayedYard
) -> None:
    yard.connection.hset(
        yard.keys.desired, ALL, b'{"run_state":"PAUSED","epoch":4,"tempo":"allegro"}'
    )

    assert signals.give(PAUSE).is_redundant
    assert not signals.give(Order(signal="SUSPEND")).is_redundant
    assert ordered(signals) == {ALL: DesiredState(run_state="SUSPENDED", epoch=4)}


def interrupt(monkeypatch: pytest.MonkeyPatch, other: Signals, between: Order) -> None:
    """Have another operator give a signal between the next one's look and its change."""

    def interrupted(self: Scripts, order: Order, seen: bytes, now: DesiredState) -> str | None:
        monkeypatch.undo()
        other.give(between)
        return self.signal(order, seen, now)

    monkeypatch.setattr(Scripts, "signal", interrupted)


def test_of_two_operators_who_pause_at_once_one_is_redundant(
    yard: PlayedYard, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given somebody who pauses between this operator's look and change
    interrupt(monkeypatch, Signals(yard), PAUSE)
    given = signals.give(Order(signal="PAUSE", mode="wait"))

    # I expect that this one finds it done.
    assert given.is_redundant
    assert given.ids == (signals.desired_states().changed,)
    assert entries(yard) == 1


def test_signal_that_became_invalid_is_refused(
    yard: PlayedYard, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals.give(PAUSE)

    interrupt(monkeypatch, Signals(yard), Order(signal="UNPAUSE"))
    with pytest.raises(Invalid, match="all is RUNNING: PAUSE it first"):
        signals.give(Order(signal="SUSPEND"))


def test_signal_gives_up_after_many_lost_races(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripts, "signal", lambda *_: None)

    with pytest.raises(BrokerUnavailable, match="the desired state of all was changed by others"):
        signals.give(PAUSE)


# DRAIN and STOP


@pytest.mark.parametrize(("signal", "verb"), [("DRAIN", "drain"), ("STOP", "stop")])
def test_workers_are_commanded_to_go(
    signals: Signals,
    host: PlayedHost,
    yard: PlayedYard,
    fake_clock: FakeClock,
    signal: Signal,
    verb: Verb,
) -> None:
    # Given two workers of a model, one of another, and one whose lease is over
    first, second = host.join("a", pid=1), host.join("b", pid=2)
    host.join("c", model="other")
    yard.connection.zadd(yard.keys.leases, {host.join("d"): 1})

    # If the model's are to go,
    given = signals.give(Order(signal=signal, scope=ADDER, why="new host"))

    # I expect a command for each of the two, and no desired state;
    assert given.workers == (first, second)
    sent = [
        (entry.decode(), parse_command(fields))
        for entry, fields in yard.connection.xrange(yard.keys.control)
    ]
    assert sent == [
        (entry, Command(verb=verb, worker=worker, why="new host"))
        for entry, worker in zip(given.ids, given.workers, strict=True)
    ]
    assert ordered(signals) == {}
    # that they are waited for until they have left, whatever they answer,
    host.answer(first, given.ids[0])
    host.show(second, state="draining")
    assert names(signals.unacknowledged(given)) == [first, second]
    host.leave(first)
    began = fake_clock.now
    assert names(signals.wait(given, BOUND_S)) == [second]
    assert fake_clock.now >= began + BOUND_S
    # and that successors are not meant.
    host.join("b", pid=3)
    host.leave(second)
    assert signals.wait(given, BOUND_S) == []


def test_drain_covers_later_incarnations_of_a_process(signals: Signals, host: PlayedHost) -> None:
    # Given a worker that is told to go at the moment in which it leaves and joins again
    before = host.join("a", host="h", pid=5)
    given = signals.give(Order(signal="DRAIN"))
    latest = host.join("a", host="h", pid=5)
    host.leave(before)

    # I expect it to be waited for until its process is gone.
    assert signals.wait(given, 0.0) == [Unacknowledged(latest, "a")]
    host.leave(latest)
    assert signals.wait(given, BOUND_S) == []


def test_worker_that_refuses_to_end_is_named_with_its_reason(
    signals: Signals, host: PlayedHost
) -> None:
    worker = host.join("a")
    given = signals.give(Order(signal="DRAIN", scope=worker_scope("a")))
    host.answer(worker, given.ids[0], "no such verb")

    assert signals.wait(given, BOUND_S) == [Unacknowledged(worker, "a", "no such verb")]


@pytest.mark.parametrize("signal", ["DRAIN", "STOP"])
def test_signal_without_live_workers(signals: Signals, yard: PlayedYard, signal: Signal) -> None:
    order = Order(signal=signal, scope=worker_scope("ghost"))
    given = signals.give(order)

    assert given == SignalReceipt(order, is_redundant=True)
    assert signals.wait(given, BOUND_S) == []
    assert not yard.connection.exists(yard.keys.control)
