"""Desired states: every cell of the transition table, how scopes merge, and what can be read."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.protocol.control import (
    ALL,
    CHANGED,
    PAUSE_MODES,
    RUN_STATES,
    SIGNALS,
    TRANSITIONS,
    DesiredState,
    DesiredStates,
    Invalid,
    Order,
    RunState,
    Signal,
    after,
    decode_desired,
    encode_desired,
    is_scope,
    model_scope,
    parse_order,
    worker_scope,
)

MODEL = model_scope("adder")
ONE = worker_scope("w")

desired_states = st.builds(
    DesiredState,
    run_state=st.sampled_from(RUN_STATES),
    mode=st.sampled_from(PAUSE_MODES),
    epoch=st.none() | st.integers(0, 5),
    weights=st.sampled_from(["", "/a", "/b"]),
    by=st.sampled_from(["", "kim@north"]),
    why=st.sampled_from(["", "night"]),
)
orders = st.builds(
    Order,
    signal=st.sampled_from(SIGNALS),
    scope=st.just(MODEL),
    mode=st.sampled_from(PAUSE_MODES),
    epoch=st.integers(0, 5),
    weights=st.sampled_from(["", "/a", "/b"]),
    by=st.sampled_from(["", "lee@south"]),
    why=st.sampled_from(["", "day"]),
)


def order(signal: Signal, scope: str = MODEL) -> Order:
    return Order(signal=signal, scope=scope, mode="keep", epoch=7, weights="/new")


@pytest.mark.parametrize("begin", RUN_STATES)
@pytest.mark.parametrize("signal", SIGNALS)
def test_every_cell_of_the_table(signal: Signal, begin: RunState) -> None:
    """A test of docs/states.md compares the table of the code with the one there."""
    rule = TRANSITIONS[signal]
    desired_state = DesiredState(run_state=begin, mode="wait", epoch=3, weights="/old")
    if begin in rule.allowed:
        assert after(desired_state, order(signal)).run_state == (rule.leads_to or begin)
    elif begin in rule.idempotent:
        assert after(desired_state, order(signal)) is desired_state
    else:
        with pytest.raises(Invalid, match=f"{signal}: {MODEL} is {begin}: (PAUSE|RESUME) it first"):
            after(desired_state, order(signal))


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_a_pause_keeps_its_mode_until_the_unpause(mode: str) -> None:
    paused = after(DesiredState(), msgspec.structs.replace(order("PAUSE"), mode=mode))
    suspended = after(paused, order("SUSPEND"))
    resumed = after(suspended, order("RESUME"))

    assert [one.mode for one in (paused, suspended, resumed)] == [mode] * 3
    assert after(resumed, order("UNPAUSE")) == DesiredState()


@given(desired_states, orders)
def test_an_order_given_twice_changes_nothing_the_second_time(
    desired_state: DesiredState, one: Order
) -> None:
    try:
        once = after(desired_state, one)
    except Invalid:
        return
    # RELOAD_WEIGHTS and the others are allowed still, and say what is said already.
    assert after(once, one) == once


@given(desired_states, orders)
def test_a_signal_changes_only_what_is_its_own(desired_state: DesiredState, one: Order) -> None:
    own: dict[Signal, set[str]] = {
        **{signal: {"run_state", "mode", "by", "why", "since_ms"} for signal in SIGNALS},
        "SET_GENERATION_EPOCH": {"epoch"},
        "RELOAD_WEIGHTS": {"weights"},
        "DRAIN": set(),
        "STOP": set(),
    }
    try:
        changed = after(desired_state, one, 7)
    except Invalid:
        return
    differing = {
        name
        for name in DesiredState.__struct_fields__
        if getattr(changed, name) != getattr(desired_state, name)
    }
    assert differing <= own[one.signal]


def test_a_worker_does_not_move_because_of_other_words() -> None:
    """What workers compare says nothing of who ordered it."""
    one = DesiredStates(
        {ALL: DesiredState(run_state="PAUSED", by="kim@north", why="night", since_ms=1)}
    )
    other = DesiredStates({ALL: DesiredState(run_state="PAUSED")})
    assert one.of("w", "adder") == other.of("w", "adder")


@pytest.mark.parametrize("epoch", [None, -1])
def test_an_epoch_is_a_whole_number_from_0(epoch: int | None) -> None:
    wrong = Order(signal="SET_GENERATION_EPOCH", epoch=epoch)
    with pytest.raises(Invalid, match="a whole number from 0"):
        after(DesiredState(), wrong)


@pytest.mark.parametrize("scope", [ALL, ONE])
def test_weights_need_the_scope_of_a_model(scope: str) -> None:
    with pytest.raises(Invalid, match="use the scope model:<name>"):
        after(DesiredState(run_state="PAUSED"), order("RELOAD_WEIGHTS", scope))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", True),
        ("model:adder", True),
        ("model:org/adder:v2", True),
        ("worker:w", True),
        ("model:", False),
        ("worker:", False),
        ("ALL", False),
        ("", False),
        ("adder", False),
        (CHANGED, False),
    ],
)
def test_scopes(text: str, expected: bool) -> None:
    assert is_scope(text) is expected


def merged(everywhere: DesiredState, model: DesiredState, worker: DesiredState) -> DesiredState:
    return DesiredStates({ALL: everywhere, MODEL: model, ONE: worker}).of("w", "adder")


@given(desired_states, desired_states, desired_states)
def test_the_desired_states_of_all_scopes_merge(
    everywhere: DesiredState, model: DesiredState, worker: DesiredState
) -> None:
    scopes = (everywhere, model, worker)
    found = merged(*scopes)

    # The strictest run state, with a mode that one of those as strict has, and none is more
    # forceful.
    assert found.run_state == max((one.run_state for one in scopes), key=RUN_STATES.index)
    modes = [one.mode for one in scopes if one.run_state == found.run_state]
    assert found.mode == min(modes, key=PAUSE_MODES.index)
    # The narrowest scope that has any.
    epochs = [one.epoch for one in scopes if one.epoch is not None]
    assert found.epoch == (epochs[-1] if epochs else None)
    weights = [one.weights for one in scopes if one.weights]
    assert found.weights == (weights[-1] if weights else "")


@given(desired_states)
def test_one_scope_alone_is_what_it_says(desired_state: DesiredState) -> None:
    for scope in (ALL, MODEL, ONE):
        ordered = msgspec.structs.replace(desired_state, by="", why="", since_ms=0)
        assert DesiredStates({scope: desired_state}).of("w", "adder") == ordered
        assert DesiredStates({scope: desired_state}).of("v", "other") == (
            ordered if scope == ALL else DesiredState()
        )


def test_a_worker_without_a_model_is_in_no_models_scope() -> None:
    found = DesiredStates({MODEL: DesiredState(run_state="PAUSED")})

    assert found.is_running("w", "")
    assert found.is_running("w", "other")
    assert not found.is_running("w", "adder")


@given(st.dictionaries(st.sampled_from([ALL, MODEL, ONE, "model:é"]), desired_states))
def test_the_hash_is_read_as_it_was_written(by_scope: dict[str, DesiredState]) -> None:
    fields = {scope.encode(): encode_desired(one) for scope, one in by_scope.items()}
    fields |= {CHANGED.encode(): b"5-1"}
    found = decode_desired({scope: packed for scope, packed in fields.items() if packed})

    assert found.changed == "5-1"
    for scope, one in by_scope.items():
        assert found.by_scope.get(scope, DesiredState()) == one


def test_unreadable_desired_states_are_skipped() -> None:
    found = decode_desired(
        {
            b"all": b"{",
            b"model:a": b'{"run_state":"DANCING"}',
            b"model:b": b'{"run_state":"PAUSED","epoch":"four"}',
            b"\xff": b"{}",
            b"worker:w": b'{"run_state":"PAUSED"}',
        }
    )
    assert found == DesiredStates({"worker:w": DesiredState(run_state="PAUSED")})
    assert found.changed == "0-0"


def test_a_desired_state_of_another_version_is_read_without_its_unknown_fields() -> None:
    found = decode_desired({b"all": b'{"run_state":"PAUSED","tempo":"allegro"}'})

    assert found.of("w", "adder") == DesiredState(run_state="PAUSED")


@pytest.mark.parametrize(
    "fields",
    [{}, {b"signal": b"{"}, {b"signal": b'{"signal":"DANCE"}'}, {b"command": b"{}"}],
)
def test_an_entry_without_an_order_that_we_can_read_has_none(fields: dict[bytes, bytes]) -> None:
    assert parse_order(fields) is None


def test_an_order_of_another_version_is_read_as_far_as_we_know_it() -> None:
    packed = b'{"signal":"PAUSE","mode":"keep","tempo":"allegro"}'

    assert parse_order({b"signal": packed}) == Order(signal="PAUSE", mode="keep")


def test_from_everywhere_one_can_get_back_to_running() -> None:
    # Given any run state, I expect RESUME and then UNPAUSE to lead to RUNNING.
    for run_state, mode in itertools.product(RUN_STATES, PAUSE_MODES):
        desired_state = DesiredState(run_state=run_state, mode=mode)
        for signal in ("RESUME", "UNPAUSE"):
            desired_state = after(desired_state, order(signal))
        assert desired_state.run_state == "RUNNING"
