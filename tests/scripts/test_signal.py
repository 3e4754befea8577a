"""signal.lua: the desired state of a scope changes and is announced."""

from __future__ import annotations

import threading

import pytest

from tests.support.yard import PlayedYard
from tokenyard.protocol.control import (
    ALL,
    CHANGED,
    DesiredState,
    DesiredStates,
    Order,
    decode_desired,
    encode_desired,
    model_scope,
    parse_order,
)
from tokenyard.scripts import Scripts

PAUSE = Order(signal="PAUSE", mode="wait", why="the test says so")
PAUSED = DesiredState(run_state="PAUSED", mode="wait")


def desired_states(yard: PlayedYard) -> DesiredStates:
    return decode_desired(yard.connection.hgetall(yard.keys.desired))


def entries(yard: PlayedYard) -> list[tuple[str, Order | None]]:
    """The entries of the control stream, as a controller reads them."""
    found = yard.connection.xrange(yard.keys.control)
    return [(entry.decode(), parse_order(fields)) for entry, fields in found]


def test_a_signal_changes_the_desired_state_and_announces_it(yard: PlayedYard) -> None:
    # Given a yard without any signal so far
    signal = yard.scripts.signal(PAUSE, b"", PAUSED)

    # I expect the desired state, the id of its last change, the signal for the controllers,
    assert signal
    assert desired_states(yard) == DesiredStates({ALL: PAUSED}, signal)
    assert entries(yard) == [(signal, PAUSE)]
    # and a wake-up for the coordinator.
    assert yard.events()[-1] == {b"event": b"signal"}


def test_a_signal_on_an_outdated_desired_state_changes_nothing(yard: PlayedYard) -> None:
    # Given a desired state that another caller changed since this one read it
    first = yard.scripts.signal(PAUSE, b"", PAUSED)
    events = len(yard.events())

    # If the caller signals with no state, an outdated one or nonsense as seen,
    for seen in (b"", b'{"run_state":"SUSPENDED"}', b"?"):
        assert yard.scripts.signal(Order(signal="SUSPEND"), seen, DesiredState()) is None

    # I expect no write.
    assert desired_states(yard) == DesiredStates({ALL: PAUSED}, first or "")
    assert entries(yard) == [(first, PAUSE)]
    assert len(yard.events()) == events


def test_the_default_desired_state_has_no_field(yard: PlayedYard) -> None:
    # Given a paused yard, if it is unpaused,
    yard.scripts.signal(PAUSE, b"", PAUSED)
    signal = yard.scripts.signal(Order(signal="UNPAUSE"), encode_desired(PAUSED), DesiredState())

    # I expect only the id of the last change to remain.
    assert yard.connection.hgetall(yard.keys.desired) == {CHANGED.encode(): (signal or "").encode()}


def test_each_scope_has_its_own_desired_state(yard: PlayedYard) -> None:
    scope = model_scope("adder")
    first = yard.scripts.signal(PAUSE, b"", PAUSED)
    epoch = Order(signal="SET_GENERATION_EPOCH", scope=scope, epoch=3)
    second = yard.scripts.signal(epoch, b"", DesiredState(epoch=3))

    assert first
    assert second
    assert desired_states(yard) == DesiredStates(
        {ALL: PAUSED, scope: DesiredState(epoch=3)}, second
    )
    assert entries(yard) == [(first, PAUSE), (second, epoch)]


def test_an_unreadable_desired_state_can_be_replaced_by_its_reader(yard: PlayedYard) -> None:
    for nonsense in (b"{", b"\xff\x00", b'{"run_state":"DANCING"}'):
        yard.connection.hset(yard.keys.desired, ALL, nonsense)
        assert yard.scripts.signal(PAUSE, nonsense, PAUSED)
        assert desired_states(yard).by_scope == {ALL: PAUSED}


def test_of_concurrent_callers_one_succeeds(yard: PlayedYard) -> None:
    # Given many operators who have read the same desired state
    scripts = [Scripts(yard) for _ in range(8)]
    begin = threading.Barrier(len(scripts))
    answers: list[str | None] = [None] * len(scripts)

    def give(place: int) -> None:
        order = Order(signal="SET_GENERATION_EPOCH", epoch=place)
        begin.wait(timeout=30)
        answers[place] = scripts[place].signal(order, b"", DesiredState(epoch=place))

    # If all signal concurrently,
    threads = [threading.Thread(target=give, args=(place,)) for place in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    # I expect one change, and a conflict for each of the others.
    (winner,) = (place for place, answer in enumerate(answers) if answer)
    assert desired_states(yard) == DesiredStates(
        {ALL: DesiredState(epoch=winner)}, answers[winner] or ""
    )
    assert len(entries(yard)) == 1


@pytest.mark.parametrize("scope", ["model:org/größe", "worker:w:1@host", "model:" + "m" * 500])
def test_a_scope_may_have_any_name(yard: PlayedYard, scope: str) -> None:
    order = Order(signal="PAUSE", scope=scope)
    assert yard.scripts.signal(order, b"", DesiredState(run_state="PAUSED"))
    assert set(desired_states(yard).by_scope) == {scope}
